"""What the events of a failure say of its cause."""

from __future__ import annotations

import dataclasses

from monarch_slurm.actor import FailureKind, MeshFailure
from monarch_slurm.train.supervisor import _cause

KILLED = MeshFailure(
    "trainer0-1", (0,),
    "the process of rank 0 failed: Killed(sig=9) (host n1, proc t.0, rank 0, pid 7); killed from outside",
    FailureKind.PROC_EXITED, exit="Killed(sig=9)", host="n1", pid=7,
)  # fmt: skip


def test_a_cause_does_not_repeat_the_exit_nor_whom_it_befell() -> None:
    assert _cause(KILLED) == "killed from outside"


def test_the_last_line_of_a_traceback_is_the_cause() -> None:
    raised = dataclasses.replace(KILLED, traceback="Traceback ...\n  File x\nValueError: no such shard\n")
    assert _cause(raised) == "ValueError: no such shard"


def test_other_texts_stay() -> None:
    assert _cause(dataclasses.replace(KILLED, event="something else\nand more", exit=None)) == "something else"
