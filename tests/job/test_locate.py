from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_slurm.job import JobFolderError, JobNotFoundError, JobSpecError, NoSlurmError, SlurmUnreachableError
from monarch_slurm.job.folder import JobFolder
from monarch_slurm.job.locate import find_job, my_jobs

FakeSlurm = Callable[..., Path]

ME = f"me({os.getuid()})"
UNKNOWN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


def make(base: Path, job: str = "12") -> JobFolder:
    folder = JobFolder.create(base, "train")
    folder.job_pickle.write_bytes(b"")
    folder.link_as(job)
    return folder


def says(**fields: str) -> str:
    line = " ".join(f"{name}={value}" for name, value in {"JobId": "12", "UserId": ME, **fields}.items())
    return f"echo '{line}'"


def test_slurm_tells_where_a_job_is(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    folder = make(tmp_path / "far" / "runs")
    fake_slurm(scontrol=says(StdOut=str(folder.batch_log), WorkDir="/"))
    assert find_job("12").folder == folder
    fake_slurm(scontrol=says(StdOut="/elsewhere/train-12.log", WorkDir=str(tmp_path / "far")))
    assert find_job("12").folder == folder


@pytest.mark.parametrize("slurm", ["forgotten", "silent", "absent"])
def test_a_folder_that_is_here_is_found_without_slurm(
    slurm: str, fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = make(tmp_path / "runs"), make(tmp_path / "other", "13")
    if slurm == "absent":
        monkeypatch.setenv("PATH", "")
    else:
        fake_slurm(
            scontrol=UNKNOWN if slurm == "forgotten" else "echo 'Unable to contact slurm controller' >&2; exit 1"
        )
    assert find_job("12").folder == folder
    assert find_job("13", log_dir=str(tmp_path / "other")).folder == other
    wanted = {"forgotten": JobNotFoundError, "silent": SlurmUnreachableError, "absent": NoSlurmError}
    with pytest.raises(wanted[slurm]):
        find_job("14")


def test_a_folder_tells_its_job(tmp_path: Path) -> None:
    folder = make(tmp_path / "runs")
    for path in (folder.path, tmp_path / "runs" / "12"):
        assert (find_job(str(path)).job_id, find_job(str(path)).folder) == ("12", folder)
    array = JobFolder.create(tmp_path / "runs", "sweep")
    array.link_as("20")
    task = array.make_task(3)
    task.job_pickle.write_bytes(b"")
    assert find_job(str(task.path)).job_id == "20_3"


@pytest.mark.parametrize(
    ("job", "scontrol", "error", "words"),
    [
        ("12", says(UserId="alice(4242)"), JobNotFoundError, "job 12 belongs to alice, not to you"),
        ("12", says(JobName="other", StdOut="/home/me/slurm-12.out"), JobFolderError, r"\(other\) was not started by"),
        ("12", says(ArrayTaskId="0-3"), JobNotFoundError, "is an array; name one of its elements, such as 12_0"),
        (
            "12",
            f"{says(ArrayTaskId='7-4000:3%2')}; {says(JobId='14', ArrayJobId='12', ArrayTaskId='5')}",
            JobNotFoundError,
            "is an array; name one of its elements, such as 12_5, 12_7$",
        ),
        ("12", UNKNOWN, JobNotFoundError, "Slurm knows no job 12"),
        ("twelve", "exit 0", JobSpecError, "'twelve' is neither a number"),
        ("-3", "exit 0", JobSpecError, "'-3' is neither a number"),
        (".", "exit 0", JobSpecError, "is not the folder of a job"),
    ],
)
def test_what_is_no_job_of_mine_is_told(
    fake_slurm: FakeSlurm, job: str, scontrol: str, error: type[Exception], words: str
) -> None:
    fake_slurm(scontrol=scontrol)
    with pytest.raises(error, match=words):
        find_job(job)


def test_my_jobs_are_those_with_a_folder(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    folder = make(tmp_path / "runs")
    array = JobFolder.create(tmp_path / "sweeps of me", "sweep")
    task = array.make_task(3)
    task.job_pickle.write_bytes(b"")
    lines = f"""\
12|12|RUNNING|1:00|9:00|n[1-2]|None|{tmp_path}|/tmp/%j.log|a|b
13|13|PENDING|0:00|1:00||Priority|/|/tmp/slurm-%j.out|other
20_3|21|PENDING|0:00|1:00||Resources|/|{array.path}/%a/batch.log|sweep
"""
    fake_slurm(squeue=f"echo >>asked; cat <<'END'\n{lines}END")
    (job, element), others = my_jobs()
    assert others == 1
    assert (job.job.folder, job.name, job.nodes, job.reason) == (folder, "a|b", "n[1-2]", "")
    assert (element.job.job_id, element.job.folder, element.reason) == ("20_3", task, "Resources")
    assert Path("asked").read_text() == "\n"  # slurmctld serves everybody: it is asked once


def test_an_element_of_an_array_is_found_by_each_of_its_ids(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    folder = make(tmp_path / "runs", "10_0")  # as of a template
    fake_slurm(scontrol=says(JobId="11", ArrayJobId="10", ArrayTaskId="0", StdOut="/my output/a b-11.log"))
    for named in ("10_0", "11"):
        assert (find_job(named).job_id, find_job(named).folder) == ("10_0", folder)
    array = JobFolder.create(tmp_path / "runs", "sweep")
    array.link_as("20")
    task = array.make_task(3)
    task.job_pickle.write_bytes(b"")
    fake_slurm(scontrol=UNKNOWN)
    assert find_job("20_3").folder == task
    assert find_job("10_0").folder == folder
    for named, element in (("20", "20_3"), ("10", "10_0")):
        with pytest.raises(JobNotFoundError, match=f"is an array; name one of its elements, such as {element}$"):
            find_job(named)
