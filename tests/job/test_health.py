from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_slurm.job import JobSpecError, SlurmUnreachableError, health
from monarch_slurm.job.health import ExaminationError, ask_nodes

FakeSlurm = Callable[..., Path]

SINFO = "echo 'n1|allocated|debug*|8|1000|(null)|(null)|none'; echo 'n2|idle|debug*|8|1000|(null)|(null)|none'"
QUEUED = "echo 'srun: job 12 queued and waiting for resources' >&2"


def test_nodes_that_slurm_does_not_allocate_in_time_are_named(fake_slurm: FakeSlurm) -> None:
    fake_slurm(srun=f"{QUEUED}; exec sleep 1000", sinfo=SINFO, squeue="echo '7|alice|n1'")
    told: list[str] = []
    with pytest.raises(
        ExaminationError, match=r"did not allocate n\[1-2\] within 2 s: n1 is allocated to job 7 of alice\."
    ):
        ask_nodes(["n1", "n2"], seconds=2.0, env={}, waiting=told.append)
    assert told == ["waiting for Slurm to allocate n[1-2]: n1 is allocated to job 7 of alice"]


def test_tasks_that_never_answer_are_findings(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "START_SECONDS", 0.2)
    allocated = f"{QUEUED}; echo 'srun: job 12 has been allocated resources' >&2"
    fake_slurm(srun=f"{allocated}; exec sleep 1000")
    findings, answers = ask_nodes(["n1", "n2"], seconds=1.0, env={})
    assert answers == {}
    assert [(finding.host, finding.level) for finding in findings] == [("n1", "bad"), ("n2", "bad")]


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("srun: error: Invalid node name specified", ExaminationError),
        ("srun: error: Unable to contact slurm controller (connect failure)", SlurmUnreachableError),
    ],
)
def test_what_srun_refuses_is_told(said: str, error: type[Exception], fake_slurm: FakeSlurm) -> None:
    fake_slurm(srun=f"echo '{said}' >&2; exit 1")
    with pytest.raises(error):
        ask_nodes(["n9"], seconds=1.0, env={})


def test_options_that_the_examination_sets_itself_are_refused(fake_slurm: FakeSlurm) -> None:
    with pytest.raises(JobSpecError, match="--nodelist of srun cannot be given"):
        ask_nodes(["n1"], seconds=1.0, env={}, options=["-wn2"])
