from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from monarch_slurm.job import SlurmAllocation
from monarch_slurm.job.folder import JobFolder
from monarch_slurm.job.steps import PAUSES, UNKNOWN_PAUSE, Steps, Verdict, judge

IO_ERROR = "srun: error: Aborting, io error and missing step on node 0"


@pytest.mark.parametrize(
    ("code", "said", "lived", "verdict"),
    [
        (0, "", 9.0, Verdict.ENDED),
        (0, "srun: Step created", 9.0, Verdict.ENDED),
        (0, IO_ERROR, 9.0, Verdict.LOST),
        (0, "srun: error: Node failure on n3", 9.0, Verdict.LOST),
        (1, "srun: error: n2: task 0: Exited with exit code 1", 1.0, Verdict.FAILED),
        (1, "srun: error: n2: task 0: Exited with exit code 1", 90.0, Verdict.LOST),
        (2, "slurmstepd: error: execve(): python: No such file or directory", 0.1, Verdict.FAILED),
        (3, "srun: error: n2: task 0: Exited with exit code 3", 1.0, Verdict.LOST),
        (4, "srun: error: n2: task 0: Exited with exit code 4", 1.0, Verdict.LOST),
        (137, "srun: error: n2: task 0: Killed", 1.0, Verdict.LOST),
        (250, "srun: error: Unable to create step", 1.0, Verdict.LOST),
        (-9, "", 1.0, Verdict.LOST),
    ],
)
def test_what_the_end_of_a_step_means(code: int, said: str, lived: float, verdict: Verdict) -> None:
    assert judge(code, said, lived) is verdict


class Script:
    """Steps of one node whose sruns end at once, each with a return code that is given."""

    def __init__(self, tmp_path: Path, *codes: int, members: Collection[str] | None = ("n1",)) -> None:
        self.now = 0.0
        self.starts: list[float] = []
        self.members: Collection[str] | None = members
        self._codes = list(codes)
        folder = JobFolder.create(tmp_path, "job")
        allocation = SlurmAllocation(7, ("n1",), 0, "n1")
        self.steps = Steps(allocation, self._command, folder, lambda job_id: self.members, lambda: self.now)
        self.steps.start()
        self.settle()

    def _command(self, name: str, index: int) -> list[str]:
        self.starts.append(self.now)
        return [sys.executable, "-S", "-c", f"import os; os._exit({self._codes.pop(0)})"]

    def settle(self) -> None:
        """Let the srun that runs end, and see it."""
        (step,) = self.steps._steps
        if step.process is not None:
            step.process.wait()
            self.steps.check(again=True)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.steps.check(again=True)
        self.settle()


def test_a_lost_step_is_tried_again_a_few_times(tmp_path: Path) -> None:
    script = Script(tmp_path, 250, 250, 250, 250)
    for pause in PAUSES:
        assert script.steps.active
        script.pass_time(pause)
    assert script.starts == [0.0, 1.0, 6.0, 31.0]
    assert not script.steps.active
    assert script.steps.worst == 250


def test_tries_of_long_ago_do_not_count(tmp_path: Path) -> None:
    script = Script(tmp_path, *[137] * 6)
    for _ in range(5):
        script.pass_time(5000.0)
    assert len(script.starts) == 6
    assert script.steps.active


def test_a_silent_slurm_is_asked_again(tmp_path: Path) -> None:
    script = Script(tmp_path, 137, 0, members=None)
    script.pass_time(PAUSES[0])
    assert script.starts == [0.0]
    script.members = {"n1"}
    script.pass_time(UNKNOWN_PAUSE)
    assert len(script.starts) == 2
    assert not script.steps.active


@pytest.mark.parametrize("code", [0, 1])
def test_a_host_that_ended_or_cannot_start_is_not_tried_again(tmp_path: Path, code: int) -> None:
    script = Script(tmp_path, code)
    assert not script.steps.active
    assert script.steps.worst == code


def test_a_node_that_is_not_in_the_job_any_more_is_not_tried_again(tmp_path: Path) -> None:
    script = Script(tmp_path, 137, members={"n2"})
    script.pass_time(PAUSES[0])
    assert not script.steps.active
    assert len(script.starts) == 1
