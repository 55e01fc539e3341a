"""``apply``, ``exec``, ``kill`` and ``context``, on hosts that are processes of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import REPOSITORY, wait_until

from monarch_slurm.job import ProcessJob, job_load
from monarch_slurm.job.processes import find_processes

JOBS = """
from monarch_slurm.job import LocalJob, ProcessJob
two = ProcessJob({"trainers": 2, "spare": 1})
here = LocalJob()
number = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "my_jobs.py").write_text(JOBS)
    yield tmp_path
    if (tmp_path / ".monarch").exists():
        command(tmp_path, "kill")


def command(folder: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "monarch_slurm", *arguments], cwd=folder, input=stdin, capture_output=True, text=True,
        timeout=120, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_a_job_is_applied_used_and_killed(folder: Path) -> None:
    refused = command(folder, "exec", "true")
    assert (refused.returncode, refused.stderr.startswith(f"error: {folder} has no job yet: `monarch-slurm apply")) == (
        1,
        True,
    )
    applied = command(folder, "apply", "my_jobs.two")
    assert (applied.returncode, applied.stdout.startswith("applied: ProcessJob(")) == (0, True), applied.stderr
    assert command(folder, "apply").stdout.startswith("is there already: ProcessJob(")

    one = command(folder, "exec", "-e", "GREETING=hi there", "bash", "-c", "echo $GREETING $MONARCH_RANK_HOSTS; exit 3")
    assert (one.returncode, one.stdout) == (3, "hi there 0\n")

    # The hosts have ended with that program: they are made anew.
    several = command(
        folder, "exec", "--mesh", "trainers", "--per-host", "gpus=2", "--script", "-", stdin="echo a\npwd\n"
    )
    assert (several.returncode, several.stdout) == (0, "")
    output = Path(several.stderr.strip().removeprefix("output: "))
    assert sorted(path.name for path in output.iterdir()) == [f"hosts_{h}_gpus_{g}" for h in (0, 1) for g in (0, 1)]
    assert (output / "hosts_1_gpus_0" / "stdout.log").read_text() == f"a\n{folder}\n"

    done = command(folder, "exec", "--mesh", "trainers", "--point", "hosts=1", "--kill", "-m", "platform")
    assert done.returncode == 0, done.stderr
    assert "Linux" in done.stdout
    assert command(folder, "kill").stderr.startswith("error: no job is remembered in ")


def test_an_applied_job_is_killed(folder: Path) -> None:
    assert command(folder, "apply", "my_jobs.two").returncode == 0
    job = job_load(str(folder / ".monarch/default/state.pkl"))
    assert isinstance(job, ProcessJob)
    assert job._folder is not None
    job_folder = job._folder.path
    assert find_processes(job_folder)
    assert command(folder, "kill", "default").stdout.startswith("killed: ProcessJob(")
    wait_until(lambda: not find_processes(job_folder) and not job_folder.exists())
    assert not (folder / ".monarch/default/state.pkl").exists()


def test_contexts(folder: Path) -> None:
    assert command(folder, "context", "create", "one", "my_jobs.two").returncode == 0
    assert command(folder, "context", "create", "other", "my_jobs.here").returncode == 0
    assert command(folder, "context", "ls").stdout == "  one  my_jobs.two\n* other  my_jobs.here\n"
    assert command(folder, "context", "use", "one").returncode == 0
    assert command(folder, "context", "ls").stdout == "* one  my_jobs.two\n  other  my_jobs.here\n"
    assert "there are: one, other" in command(folder, "context", "use", "third").stderr
    assert command(folder, "context", "rm", "one").returncode == 0
    assert command(folder, "context", "ls").stdout == "  other  my_jobs.here\n"
    assert os.listdir(folder / ".monarch") == ["other"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["apply", "nodot"], 2, "module.attribute expected"),
        (["apply", "my_jobs.three"], 2, "no attribute 'three'"),
        (["apply", "my_jobs.number"], 2, "is no job but a int"),
        (["apply", "no_such.job"], 2, "No module named"),
        (["context", "create", "../x", "my_jobs.two"], 2, "letters, digits"),
        (["exec"], 2, "a command, --script or -m expected"),
        (["exec", "--all", "--one", "true"], 2, "exclude each other"),
        (["exec", "--per-host", "gpus", "true"], 2, "NAME=VALUE expected"),
        (["exec", "--point", "hosts=x", "true"], 2, "DIM=N expected"),
    ],
)
def test_bad_input_is_told(folder: Path, arguments: list[str], code: int, words: str) -> None:
    done = command(folder, *arguments)
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr
