from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from monarch_slurm.job.errors import SlurmUnreachableError
from monarch_slurm.job.folder import JobFolder
from monarch_slurm.job.requeue import (
    DEFAULT_KILL_WAIT,
    QUICK_SECONDS,
    kill_wait,
    may_start_again,
    requeue,
    why_asked_to_end,
)


class Told:
    """Signals that come with the first wait after ``waits``."""

    def __init__(self, waits: int) -> None:
        self.stop = False
        self.waits = waits

    def wait(self, seconds: float) -> None:
        self.waits -= 1
        self.stop = self.waits < 0


class Slurm:
    def __init__(self, *answers: tuple[int, str] | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[list[str]] = []

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.asked.append(list(command))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        code, said = answer
        return subprocess.CompletedProcess(command, code, said, said)


def test_slurm_is_asked_until_it_answers() -> None:
    down = (1, "slurm_requeue error: Unable to contact slurm controller (connect failure)")
    slurm = Slurm(down, SlurmUnreachableError("scontrol did not answer within 5 s"), (0, ""))
    assert requeue(7, Told(3), slurm)  # type: ignore[arg-type]
    assert slurm.asked == [["scontrol", "requeue", "7"]] * 3


def test_a_job_that_slurm_does_not_start_again_ends() -> None:
    assert not requeue(7, Told(3), Slurm((1, "Requested operation is presently disabled for job 7")))  # type: ignore[arg-type]


def test_a_job_that_is_being_ended_asks_no_more() -> None:
    slurm = Slurm(*[SlurmUnreachableError("no")] * 2)
    assert not requeue(7, Told(1), slurm)  # type: ignore[arg-type]
    assert len(slurm.asked) == 2


def test_kill_wait_is_that_of_the_cluster() -> None:
    assert (
        kill_wait(Slurm((0, "KeepAliveTime = 1\nKillOnBadExit           = 0\nKillWait                = 42 sec\n")))
        == 42.0
    )
    assert kill_wait(Slurm((1, ""))) == DEFAULT_KILL_WAIT
    assert kill_wait(Slurm(SlurmUnreachableError("no"))) == DEFAULT_KILL_WAIT


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ("JobId=7\n   EndTime=2026-11-30T23:59:59 Deadline=N/A\n   PreemptTime=None\n", "the time limit"),
        ("JobId=7\n   EndTime=2026-11-30T23:59:59 Deadline=N/A\n", "the time limit"),
        ("EndTime=2026-12-01T00:01:59\n PreemptEligibleTime=x PreemptTime=2026-11-30T23:59:59\n", "a preemption"),
        ("", "the time limit or a preemption"),
    ],
)
def test_a_notice_has_its_reason(told: str, reason: str) -> None:
    run = lambda command: subprocess.CompletedProcess(command, 0, told, "")  # noqa: E731
    assert why_asked_to_end("7_1", run) == reason


def test_without_an_answer_both_reasons_are_named() -> None:
    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        raise SlurmUnreachableError("slurmctld does not answer")

    assert why_asked_to_end(7, run) == "the time limit or a preemption"


def test_a_program_that_is_killed_at_every_start_is_not_started_for_ever(tmp_path: Path) -> None:
    folder, late = JobFolder(tmp_path), QUICK_SECONDS + 1
    assert [may_start_again(folder, 5.0) for _ in range(3)] == [True, True, False]
    assert [may_start_again(folder, ran) for ran in (late, 5.0, 5.0, late, 5.0)] == [True] * 5
