from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_slurm.job import (
    JobError,
    LocalJob,
    MeshAdminConfig,
    TelemetryConfig,
    load_current_job,
    set_current_job,
)
from monarch_slurm.job.current import current_context


@pytest.fixture(autouse=True)
def _jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_jobs.py").write_text(
        "from monarch_slurm.job import LocalJob\none, two, none = LocalJob(('one',)), LocalJob(('two',)), 3\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("my_jobs", None)


def test_the_current_job_of_a_folder() -> None:
    with pytest.raises(FileNotFoundError, match="set_current_job"):
        load_current_job()
    set_current_job("my_jobs.one")
    assert repr(load_current_job()) == "LocalJob(hosts=('one',))"
    set_current_job("my_jobs.two", context="other")
    assert repr(load_current_job()) == "LocalJob(hosts=('two',))"
    assert current_context() == "other"
    assert os.readlink(".monarch/job_state.pkl") == "other/state.pkl"
    assert Path(".monarch/default/spec").read_text() == "my_jobs.one\n"
    set_current_job("my_jobs.one")
    assert current_context() == "other"


def test_a_job_is_remembered_in_its_context() -> None:
    job = set_current_job("my_jobs.one")
    job.state()
    assert Path(".monarch/default/state.pkl").is_file()
    assert Path(".monarch/job_state.pkl").is_symlink()


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ("nodot", ValueError),
        ("my_jobs.", ValueError),
        ("my_jobs.three", AttributeError),
        ("no_such_module.job", ImportError),
        ("my_jobs.none", TypeError),
    ],
)
def test_specs_that_name_no_job(spec: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        set_current_job(spec)
    assert not Path(".monarch").exists()


def test_a_context_cannot_leave_its_folder_and_a_remembered_job_is_not_lost() -> None:
    with pytest.raises(ValueError, match="context"):
        set_current_job("my_jobs.one", context="../elsewhere")
    LocalJob().dump(".monarch/job_state.pkl")
    with pytest.raises(JobError, match="kill that job"):
        set_current_job("my_jobs.one")


def test_services_that_are_not_there_are_refused_and_not_ignored() -> None:
    job = LocalJob()
    for refuse in (
        lambda: job.enable_telemetry(TelemetryConfig(include_dashboard=True)),
        lambda: job.enable_admin(MeshAdminConfig()),
        lambda: job.remote_mount("/data"),
        lambda: job.gather_mount("/a", "/b"),
    ):
        with pytest.raises(NotImplementedError, match="here"):
            refuse()
    assert job.state(cached_path=None).telemetry_url is None
