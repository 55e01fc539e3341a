from __future__ import annotations

import subprocess
from collections.abc import Sequence

import pytest

from monarch_slurm.job.errors import JobEndedError, JobNotFoundError, JobStartTimeoutError, SlurmUnreachableError
from monarch_slurm.job.status import (
    NOT_FOUND_GRACE,
    PHASES,
    JobStatus,
    Phase,
    StartWatch,
    query,
    wait_for_start,
)

INVALID = (1, "", "slurm_load_jobs error: Invalid job id specified")
DISABLED = (1, "", "Slurm accounting storage is disabled")
DOWN = (1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")


class Slurm:
    """Slurm's commands with recorded answers."""

    def __init__(self, **answers: tuple[int, str, str]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.asked.append(command[0])
        code, out, err = self.answers[command[0]]
        return subprocess.CompletedProcess(list(command), code, out, err)


def scontrol(state: str, code: str, reason: str = "None") -> tuple[int, str, str]:
    line = (
        f"JobId=7 JobName=a=b JobState={state} Reason={reason} Dependency=(null) ExitCode={code} DerivedExitCode=0:0 "
        "StartTime=2026-01-02T03:04:05 ReqNodeList=(null) ExcNodeList=(null) NodeList=n[1-2] BatchHost=n1\n"
    )
    return 0, line, ""


def test_squeue_alone_answers_for_a_job_that_waits_or_runs() -> None:
    slurm = Slurm(squeue=(0, "PENDING|2026-01-02T03:04:05||Resources\n", ""))
    status = query(7, slurm)
    assert status == JobStatus(7, "PENDING", "Resources", "", "2026-01-02T03:04:05")
    assert str(status) == "job 7 is PENDING (Resources), expected to start 2026-01-02 03:04:05"
    slurm = Slurm(squeue=(0, "RUNNING|2026-01-02T03:04:05|rack1n[01-02],rack2n01|None\n", ""))
    assert query(7, slurm).nodes == "rack1n[01-02],rack2n01"
    assert slurm.asked == ["squeue"]


def test_scontrol_knows_the_exit_code() -> None:
    slurm = Slurm(
        squeue=(0, "FAILED|N/A|n1|NonZeroExitCode\n", ""), scontrol=scontrol("FAILED", "3:0", "NonZeroExitCode")
    )
    status = query(7, slurm)
    assert (status.state, status.exit_code, status.source, status.reason) == (
        "FAILED",
        3,
        "scontrol",
        "NonZeroExitCode",
    )
    assert query(7, Slurm(squeue=INVALID, scontrol=scontrol("CANCELLED", "0:15"))).exit_code == 128 + 15
    assert query(7, Slurm(squeue=INVALID, scontrol=scontrol("COMPLETED", "0:0"))).exit_code == 0


def test_sacct_is_the_last_resort() -> None:
    answer = (0, "CANCELLED by 0|0:15|n[1-2]|2026-01-02T03:04:05\n", "")
    status = query(7, Slurm(squeue=INVALID, scontrol=INVALID, sacct=answer))
    assert (status.state, status.phase, status.exit_code, status.source) == ("CANCELLED", Phase.ENDED, 143, "sacct")


@pytest.mark.parametrize("sacct", [DISABLED, (0, "", "")])
def test_a_job_that_nobody_knows_is_not_found(sacct: tuple[int, str, str]) -> None:
    with pytest.raises(JobNotFoundError, match="no job 7"):
        query(7, Slurm(squeue=INVALID, scontrol=INVALID, sacct=sacct))


def test_silence_is_not_absence() -> None:
    with pytest.raises(SlurmUnreachableError, match="Slurm's controller does not answer"):
        query(7, Slurm(squeue=DOWN, scontrol=DOWN))


@pytest.mark.parametrize("state", [state for state, phase in PHASES.items() if phase is Phase.ENDED])
def test_every_terminal_state_ends_the_wait(state: str) -> None:
    with pytest.raises(JobEndedError, match=state):
        StartWatch(7, None, 0.0).see(1.0, JobStatus(7, state))


def test_a_state_of_a_later_release_is_waited_for() -> None:
    assert StartWatch(7, None, 0.0).see(1.0, JobStatus(7, "DREAMING", "Weather")) == "job 7 is DREAMING (Weather)"


def test_an_unknown_job_has_a_grace_that_begins_anew_when_it_is_seen() -> None:
    watch, gone = StartWatch(7, None, 0.0), JobNotFoundError("gone")
    assert watch.see(NOT_FOUND_GRACE, gone) is None
    watch.see(NOT_FOUND_GRACE + 1, JobStatus(7, "PENDING"))
    assert watch.see(2 * NOT_FOUND_GRACE, gone) is None
    watch.see(3 * NOT_FOUND_GRACE, SlurmUnreachableError("squeue failed"))
    assert watch.see(4 * NOT_FOUND_GRACE, gone) is None
    with pytest.raises(JobNotFoundError):
        watch.see(4 * NOT_FOUND_GRACE + 1, gone)


def test_news_are_told_once() -> None:
    watch = StartWatch(7, None, 0.0)
    waiting = JobStatus(7, "PENDING", "PartitionNodeLimit")
    told = watch.see(1.0, waiting)
    assert told is not None
    assert "will not start like this" in told
    assert watch.see(2.0, waiting) is None
    assert watch.see(3.0, JobStatus(7, "PENDING", "Resources")) == "job 7 is PENDING (Resources)"


def test_the_wait_has_an_end_if_one_is_given() -> None:
    watch = StartWatch(7, 60.0, 0.0)
    watch.see(59.0, JobStatus(7, "PENDING", "Priority"))
    with pytest.raises(JobStartTimeoutError, match=r"PENDING \(Priority\) after 61 s.*scancel 7"):
        watch.see(61.0, JobStatus(7, "PENDING", "Priority"))


def test_waiting_ends_when_the_job_runs() -> None:
    now = [0.0]
    answers = iter(
        [
            JobNotFoundError("not yet"),
            JobStatus(7, "PENDING", "Resources"),
            SlurmUnreachableError("squeue failed: timeout"),
            JobStatus(7, "CONFIGURING"),
            JobStatus(7, "RUNNING", nodes="n[1-2]"),
        ]
    )

    def ask(job_id: int) -> JobStatus:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def sleep(seconds: float) -> None:
        now[0] += seconds

    told: list[str] = []
    assert wait_for_start(7, None, told.append, ask, lambda: now[0], sleep).nodes == "n[1-2]"
    assert told == [
        "job 7 is PENDING (Resources)",
        "job 7: squeue failed: timeout; trying again",
        "job 7 is CONFIGURING",
        "job 7 is RUNNING",
    ]
