"""What a batch script of one's own starts, without a cluster: which folder, and what is told when it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_slurm.job import SlurmAllocation
from monarch_slurm.job.folder import JobFolder
from monarch_slurm.job.launch import _folder

FakeSlurm = Callable[..., Path]
JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "n1"}


def launch(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "monarch_slurm.job.launch", *arguments]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "env", "code", "words"),
    [
        ([], JOB, 2, "error: no program: say sbatch SCRIPT train.py ARGUMENTS\n"),
        (["--", "train.py"], {}, 1, "error: not in a job of Slurm: SLURM_JOB_ID is not set here; run this inside of"),
        (["--container=image", "--", "train.py"], JOB, 2, "error: container 'image': say its runtime"),
        (["--log-dir=/proc/runs", "--", "train.py"], JOB, 1, "error: cannot make a folder for the job"),
        (["--spares=1", "--", "train.py"], JOB, 2, "error: 1 spares of 1 nodes leave none to use"),
        (["--frob"], JOB, 2, "unrecognized arguments: --frob"),
    ],
)
def test_what_cannot_be_started_is_told(
    fake_slurm: FakeSlurm, arguments: list[str], env: dict[str, str], code: int, words: str
) -> None:
    fake_slurm()
    done = launch(*arguments, **env)
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr


def test_each_start_of_a_job_finds_its_folder_and_another_job_does_not(tmp_path: Path) -> None:
    first = SlurmAllocation(12, ("n1",), 0, "n1")
    again = SlurmAllocation(12, ("n1",), 0, "n1", restarts=1)
    folder = _folder(tmp_path, first, "12")
    assert _folder(tmp_path, first, "12") == folder, "slurmctld may start a job twice, after a crash of its own"
    folder.write_exit_code(0)
    assert _folder(tmp_path, again, "12") == folder
    other = _folder(tmp_path, first, "12")
    assert other != folder
    assert JobFolder((tmp_path / "12").resolve()) == other
    assert _folder(tmp_path, again, "12") == other


def test_the_folder_of_an_element_of_an_array_has_both_of_its_ids(tmp_path: Path) -> None:
    folder = _folder(tmp_path, SlurmAllocation(13, ("n1",), 0, "n1"), "12_0")
    assert {link.name for link in tmp_path.iterdir() if link.is_symlink()} == {"12_0", "13"}
    unlisted = SlurmAllocation(13, ("n1",), 0, "n1", restarts=1)  # slurmctld did not answer at the second start
    assert _folder(tmp_path, unlisted, "13") == folder
