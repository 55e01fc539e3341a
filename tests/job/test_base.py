from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.job import (
    DEFAULT_JOB_PATH,
    BatchJob,
    JobError,
    JobSpecError,
    JobState,
    JobTrait,
    LocalJob,
    job_load,
    job_loads,
)
from monarch_slurm.job.base import Script, program_arguments


class Recorded(JobTrait):
    """A job that only writes down what is asked of it."""

    def __init__(self, size: int = 1, kill_error: Exception | None = None) -> None:
        super().__init__()
        self.size = size
        self.kill_error = kill_error
        self.script: Script | None = None
        self.lives = True

    def _create(self, client_script: Script | None) -> None:
        self.script = client_script

    def _state(self) -> JobState:
        mesh: Any = ("mesh of", self.size)
        return JobState({"hosts": mesh})

    def can_run(self, spec: JobTrait) -> bool:
        return isinstance(spec, Recorded) and spec.size == self.size and self.lives

    def _kill(self) -> None:
        KILLED.append(self.size)
        if self.kill_error is not None:
            raise self.kill_error


KILLED: list[int] = []


@pytest.fixture(autouse=True)
def _nothing_killed() -> None:
    KILLED.clear()


def test_apply_makes_a_job_once() -> None:
    job = Recorded()
    assert (job.active, job.apply_id) == (False, None)
    job.apply("a")
    first = job.apply_id
    job.apply("b")
    assert (job.active, job.apply_id, job.script) == (True, first, "a")
    job.kill()
    job.apply("b")
    assert job.apply_id not in (None, first)
    assert job.script == "b"


def test_state_gives_meshes_by_name() -> None:
    state: Any = Recorded(3).state(None)
    assert state.hosts == ("mesh of", 3)
    with pytest.raises(AttributeError, match="no hosts named 'trainers'; there are: hosts"):
        _ = state.trainers
    assert "hosts" in dir(state)


def test_a_remembered_job_that_suffices_is_used_again() -> None:
    first = Recorded(2)
    first.state()
    assert Path(DEFAULT_JOB_PATH).stat().st_mode & 0o077 == 0
    second = Recorded(2)
    second.state()
    assert second.apply_id == first.apply_id
    assert second.active
    second.kill()
    assert KILLED == [2]


def test_a_remembered_job_that_does_not_suffice_is_killed_and_replaced() -> None:
    Recorded(2).state()
    Recorded(5).state()
    assert KILLED == [2]
    loaded = job_load()
    assert isinstance(loaded, Recorded)
    assert loaded.size == 5


@pytest.mark.parametrize("error", [NotImplementedError(), MonarchSlurmError("Slurm does not answer")])
def test_a_remembered_job_that_cannot_be_killed_is_dropped(error: Exception) -> None:
    Recorded(2, error).state()
    state: Any = Recorded(5).state()
    assert state.hosts == ("mesh of", 5)


def test_without_a_path_nothing_is_remembered() -> None:
    Recorded().state(None)
    assert not Path(DEFAULT_JOB_PATH).exists()


def test_a_link_is_followed_and_kept(tmp_path: Path) -> None:
    target = tmp_path / "context" / "state.pkl"
    link = tmp_path / "job.pkl"
    link.symlink_to(target)
    Recorded(1).dump(str(link))
    Recorded(2).state(str(link))
    assert link.is_symlink()
    assert isinstance(job_load(str(link)), Recorded)
    assert target.exists()


def test_what_is_not_a_job_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "job.pkl"
    for content in (b"", b"no pickle", pickle.dumps(3), b"\x80\x04cmissing\nName\n."):
        path.write_bytes(content)
        with pytest.raises(JobError, match=r"job\.pkl.*remove it"):
            job_load(str(path))
    with pytest.raises(FileNotFoundError):
        job_load(str(tmp_path / "none.pkl"))


def test_a_program_inside_of_a_job_gets_that_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outer = Recorded(7)
    BatchJob(outer).dump(str(tmp_path / "job.pkl"))
    monkeypatch.setenv("MONARCH_BATCH_JOB", "1")
    monkeypatch.setenv("MONARCH_SLURM_JOB_FOLDER", str(tmp_path))
    state: Any = Recorded(1).state()
    assert state.hosts == ("mesh of", 7)
    assert isinstance(job_load(), BatchJob)
    assert job_load().size == 7  # type: ignore[attr-defined]


def test_jobs_travel_as_bytes() -> None:
    job = job_loads(Recorded(4).dumps())
    assert isinstance(job, Recorded)
    assert job.size == 4


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("python train.py --lr '1 2'", ["python", "train.py", "--lr", "1 2"]),
        ("train.py -v", [sys.executable, "train.py", "-v"]),
        (["./my train.py"], [sys.executable, "./my train.py"]),
        (["bash", "-c", "exit 3"], ["bash", "-c", "exit 3"]),
    ],
)
def test_a_client_script_is_a_command_line_or_a_python_file(script: Script, arguments: list[str]) -> None:
    assert program_arguments(script) == arguments


@pytest.mark.parametrize("script", ["", [], "python 'train.py"])
def test_a_client_script_that_is_no_command_line_is_refused(script: Script) -> None:
    with pytest.raises(JobSpecError):
        program_arguments(script)


def test_a_local_job_runs_its_client_script_beside_this_process(tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(
        "import os, sys\n"
        "from monarch_slurm.job import job_load\n"
        "print(type(job_load()).__name__, os.environ['MONARCH_BATCH_JOB'])\n"
        "print('oops', file=sys.stderr)\n"
        "sys.exit(3)\n"
    )
    job = LocalJob()
    with pytest.raises(ValueError, match="no client script"):
        _ = job.process
    job.apply("client.py")
    assert job.process.wait(60) == 3
    assert job.log_dir is not None
    assert job.log_dir.parent == tmp_path / ".monarch" / "logs"
    assert (job.log_dir / "stdout.log").read_text() == "BatchJob 1\n"
    assert (job.log_dir / "stderr.log").read_text() == "oops\n"
    assert job.process.pid != os.getpid()
    assert not job.can_run(LocalJob())


class Hooked(Recorded):
    """A job of a user's own that has overridden whatever may be."""

    def __init__(self, secret: str, size: int = 1, kill_error: Exception | None = None) -> None:
        super().__init__(size, kill_error)
        self.secret = secret
        self.gateway = ""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "secret": ""}

    def _rebind_connection_inputs(self, spec: JobTrait) -> None:
        super()._rebind_connection_inputs(spec)
        assert isinstance(spec, Hooked)
        self.secret = spec.secret

    def _cleanup_log_context(self) -> dict[str, Any]:
        return {**super()._cleanup_log_context(), "cluster_job": 17}

    def _prepare_client_gateway(self) -> None:
        super()._prepare_client_gateway()
        self._attach_client(None)
        self.gateway = self._sidecar_attach_to() or "none is needed"

    def _requires_sidecar_gateway(self) -> bool:
        return not super()._requires_sidecar_gateway()

    def _state(self) -> JobState:
        self._prepare_client_gateway()
        return JobState(super()._state()._hosts, telemetry_url=f"http://{self.secret}", dashboard_url=self.gateway)


def test_a_remembered_job_gets_what_only_the_program_of_today_knows() -> None:
    Hooked("of yesterday").state()
    assert b"of yesterday" not in Path(DEFAULT_JOB_PATH).read_bytes()
    state = Hooked("of today").state()
    assert (state.telemetry_url, state.dashboard_url) == ("http://of today", "none is needed")
    assert state.admin_url is None


def test_what_helps_to_end_a_job_by_hand_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    Hooked("a", 2, MonarchSlurmError("no credentials")).state()
    Hooked("a", 3).state()
    assert "{'job_type': 'Hooked', 'cluster_job': 17}" in caplog.text
    assert "no credentials" in caplog.text


def test_defaults_of_hooks() -> None:
    job = Recorded()
    job.apply()
    assert job._is_running()
    job.lives = False
    assert not job._is_running()
    assert not job._requires_sidecar_gateway()
    assert job._should_spawn_telemetry_worker_collector_actors()
    assert LocalJob()._is_running()
    wrapped = BatchJob(Hooked("a"))
    assert wrapped._is_running()
    assert wrapped._cleanup_log_context()["cluster_job"] == 17


def test_an_id_is_that_of_hosts_that_are_there() -> None:
    job = Recorded()
    job.apply()
    assert job.apply_id
    job.kill()
    assert job.apply_id is None
