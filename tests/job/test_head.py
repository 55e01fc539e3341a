from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from monarch_slurm.job import SlurmAllocation, SlurmUnreachableError
from monarch_slurm.job.folder import JobFolder
from monarch_slurm.job.head import Head, end_without_head, head_state, job_nodes, poll_seconds


@pytest.mark.parametrize(
    ("squeue", "sinfo", "expected"),
    [
        ("RUNNING|n1|n[1-4]", "allocated", Head.THERE),
        ("RUNNING|n1|n[1-4]", "mixed\nmixed", Head.THERE),
        ("RUNNING|n1|n[1-4]", "allocated*", Head.UNKNOWN),
        ("RUNNING|n1|n[1-4]", "down*", Head.UNKNOWN),
        ("RUNNING|n1|n[1-4]", "", Head.UNKNOWN),
        ("RUNNING|n1|n[2-4]", "", Head.LOST),
        ("RUNNING|n1|n1x,n[2-4]", "", Head.LOST),
        ("COMPLETING|n1|n[2-4]", "", Head.JOB_ENDED),
        ("RUNNING|n1|n[1-2]\nRUNNING|n3|n4", "allocated", Head.THERE),  # heterogeneous
        ("RUNNING|n1|n2\nRUNNING|n3|n[3-4]", "", Head.LOST),
        ("PENDING|n/a|", "", Head.UNKNOWN),
        ("", "", Head.UNKNOWN),
        ("RUNNING|n1|n[2-", "", Head.UNKNOWN),
    ],
)
def test_the_head_is_lost_only_when_slurm_says_so(squeue: str, sinfo: str, expected: Head) -> None:
    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, {"squeue": squeue, "sinfo": sinfo}[command[0]] + "\n", "")

    assert head_state(7, run) is expected


def test_silence_of_slurm_is_no_answer() -> None:
    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        raise SlurmUnreachableError("squeue did not answer within 60 s")

    assert head_state(7, run) is Head.UNKNOWN


@pytest.mark.parametrize(
    ("squeue", "nodes"), [("n[1-2,4]\n", {"n1", "n2", "n4"}), ("n1\nn4\n", {"n1", "n4"}), ("", None), ("n[1-", None)]
)
def test_the_nodes_that_a_job_still_has(squeue: str, nodes: set[str] | None) -> None:
    assert job_nodes(7, lambda command: subprocess.CompletedProcess(command, 0, squeue, "")) == nodes


@pytest.mark.parametrize(("requeue", "command"), [(False, "scancel 7"), (True, "scontrol requeue 7")])
def test_the_end_is_said_in_the_batch_log(requeue: bool, command: str, tmp_path: Path) -> None:
    asked: list[str] = []

    def run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        asked.append(" ".join(arguments))
        return subprocess.CompletedProcess(arguments, 0, "", "")

    folder = JobFolder.create(tmp_path, "job")
    end_without_head(folder, SlurmAllocation(7, ("n1", "n2"), 1, "n2"), requeue, run)
    assert asked == [command]
    element = SlurmAllocation(7, ("n1", "n2"), 1, "n2", array_task=3)  # 7 alone would be all elements
    end_without_head(folder, element, requeue, run)
    assert asked[1:] == [f"{command}_3"]
    assert folder.batch_log.read_text().startswith("monarch_slurm: n2: the head node is lost: ")


def test_many_nodes_ask_seldom() -> None:
    assert poll_seconds(4)[1] == 5.0
    assert poll_seconds(1000)[1] == 500.0
    assert 0 <= poll_seconds(1000)[0] <= 500
