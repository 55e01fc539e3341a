"""From what a person types to the job: its number or its folder, whoever has submitted it and from where."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch_slurm.job.errors import (
    JobFolderError,
    JobNotFoundError,
    JobSpecError,
    NoSlurmError,
    SlurmUnreachableError,
)
from monarch_slurm.job.folder import JobFolder
from monarch_slurm.job.slurm import DEFAULT_LOG_DIR
from monarch_slurm.job.status import Run, run_command
from monarch_slurm.job.unreachable import slurm_failure

_JOB_ID = re.compile(r"[0-9]+(_[0-9]+|\+[0-9]+)?")
_FIELD = re.compile(r"\b(JobId|ArrayJobId|ArrayTaskId|JobName|UserId|StdOut|WorkDir)=(.*?)(?= [\w:/]+=|$)")
_USER = re.compile(r"(.*)\(([0-9]+)\)")
_PLACEHOLDER = re.compile(r"%[0-9]*([Aajx])")
_FIRST_NUMBER = re.compile(r"[0-9]+")
_NAMED_TASKS = 3
_LIST_FIELDS = (
    "JobArrayID", "JobID", "State", "TimeUsed", "TimeLeft", "NodeList", "Reason", "WorkDir", "StdOut", "Name",
)  # fmt: skip


@dataclass(frozen=True)
class FoundJob:
    """A job of ours.

    Attributes:
        job_id: Slurm's number; for a task of an array such as ``"12_3"``.
        folder: what it keeps on disk.
    """

    job_id: str
    folder: JobFolder


@dataclass(frozen=True)
class ListedJob:
    """A job of ours in Slurm's queue; all but ``job`` in Slurm's words.

    Attributes:
        elapsed, left: time since its start and until its limit.
        nodes: compressed; empty while it waits.
        reason: why it waits.
    """

    job: FoundJob
    name: str
    state: str
    elapsed: str
    left: str
    nodes: str
    reason: str


def find_job(job: str, log_dir: str | None = None, run: Run = run_command) -> FoundJob:
    """Return the job that ``job`` names.

    Args:
        job: Slurm's number, or the path of the job's folder.
        log_dir: folder that holds the job's folder, for a job that Slurm has forgotten.

    Raises:
        JobSpecError: it is neither a number nor the folder of a job.
        JobNotFoundError: nobody knows it, or it is somebody else's.
        JobFolderError: it is no job of this package, or its folder is gone.
        NoSlurmError, SlurmUnreachableError: Slurm cannot tell where it is, and its folder is not here.
    """
    if not _JOB_ID.fullmatch(job):
        return _from_folder(Path(job))
    bases = [Path(base) for base in (log_dir, DEFAULT_LOG_DIR) if base is not None]
    told, silence = None, None
    try:
        told = _ask_slurm(job, run)
    except (NoSlurmError, SlurmUnreachableError) as error:
        silence = error
    if told is not None:
        names = dict.fromkeys((_listed_id(told), job, told["JobId"]))
        places = _places(names, [Path(told["WorkDir"]) / DEFAULT_LOG_DIR, *bases] if "WorkDir" in told else bases)
        output = [Path(told["StdOut"]).parent] if "StdOut" in told else []
        if (folder := _first_folder([*output, *places])) is None:
            raise JobFolderError(
                f"job {job} ({told.get('JobName', '')}) was not started by monarch_slurm, or its folder is gone; its "
                f"output: {told.get('StdOut', 'unknown')}"
            )
        return FoundJob(next(iter(names)), folder)
    if (folder := _first_folder(_places([job], bases))) is None:
        if silence is not None:
            raise silence
        if tasks := _task_folders([base / job for base in bases]):
            raise JobNotFoundError(_is_an_array(job, tasks))
        raise JobNotFoundError(f"Slurm knows no job {job} (any more), and there is no {bases[0] / job}")
    return FoundJob(job, folder)


def my_jobs(run: Run = run_command) -> tuple[list[ListedJob], int]:
    """Return this user's jobs of ours that have not ended, and the number of those that are not ours.

    slurmctld is asked once, however many jobs there are.

    Raises:
        NoSlurmError, SlurmUnreachableError
    """
    columns = ",".join(f"{name}:|" for name in _LIST_FIELDS[:-1]) + f",{_LIST_FIELDS[-1]}:"
    done = run(["squeue", "-h", "-r", "-u", str(os.getuid()), "-O", columns])
    if done.returncode != 0:
        raise slurm_failure(done, "squeue failed", run)
    found, others = [], 0
    for line in done.stdout.splitlines():
        job, number, state, elapsed, left, nodes, reason, work_dir, output, name = line.split(
            "|", len(_LIST_FIELDS) - 1
        )
        places = _places([job, number], [Path(work_dir) / DEFAULT_LOG_DIR, Path(DEFAULT_LOG_DIR)])
        folder = _first_folder([Path(_filled_in(output, job, number, name)).parent, *places])
        if folder is None:
            others += 1
        else:
            reason = "" if reason == "None" else reason
            found.append(ListedJob(FoundJob(job, folder), name, state, elapsed, left, nodes, reason))
    return found, others


def _places(names: Iterable[str], bases: Sequence[Path]) -> list[Path]:
    """Return where the folder of a job with these ids may be: by a link beside it, or inside of its array's folder."""
    return [base / each for name in names for base in bases for each in dict.fromkeys((name, name.replace("_", "/")))]


def _filled_in(output: str, job: str, number: str, name: str) -> str:
    """Return the path of a job's output for what ``sbatch --output`` was given, which squeue shows as it is."""
    array, _, task = job.partition("_")
    values = {"A": array, "a": task, "j": number, "x": name}
    return _PLACEHOLDER.sub(lambda match: values[match[1]], output)


def _from_folder(path: Path) -> FoundJob:
    if not path.is_dir():
        raise JobSpecError(f"{str(path)!r} is neither a number of Slurm's nor the folder of a job")
    path = path.resolve()
    if not _is_job_folder(path):
        if (path / "journal.jsonl").exists():
            raise JobSpecError(
                f"{path} is the folder of a run, not of a job of Slurm: journal.jsonl in it tells what the run does, "
                "report.html how it ended, and `monarch-slurm stacks` where its processes are"
            )
        raise JobSpecError(f"{path} is not the folder of a job")
    names = [link.name for link in path.parent.iterdir() if link.is_symlink() and link.resolve() == path]
    if path.name.isdecimal():  # a task, in the folder of its array
        names += [f"{link.name}_{path.name}" for link in path.parent.parent.iterdir() if _leads_to(link, path.parent)]
    job = next((name for name in names if _JOB_ID.fullmatch(name)), None)
    if job is None:
        raise JobFolderError(f"{path} does not tell which job it is of; it was never submitted")
    return FoundJob(job, JobFolder(path))


def _leads_to(link: Path, folder: Path) -> bool:
    return link.is_symlink() and link.resolve() == folder


def _ask_slurm(job: str, run: Run) -> dict[str, str] | None:
    """Return what Slurm says of a job; None if it knows none.

    Raises:
        JobNotFoundError: it is somebody else's, or an array.
        SlurmUnreachableError, NoSlurmError
    """
    done = run(["scontrol", "show", "job", "-o", job])
    if done.returncode != 0:
        if "invalid job id" in done.stderr.lower():
            return None
        raise slurm_failure(done, "scontrol failed", run)
    jobs = [dict(_FIELD.findall(line)) for line in done.stdout.strip().splitlines()]
    if not jobs:
        return None
    told = jobs[0]  # of a heterogeneous job, the component with its output
    user = _USER.fullmatch(told.get("UserId", ""))
    if user is not None and int(user[2]) != os.getuid():
        raise JobNotFoundError(f"job {job} belongs to {user[1]}, not to you")
    if "_" not in job and "ArrayTaskId" in told and (len(jobs) > 1 or not told["ArrayTaskId"].isdecimal()):
        first = (_FIRST_NUMBER.match(each.get("ArrayTaskId", "")) for each in jobs)
        raise JobNotFoundError(_is_an_array(job, sorted(int(match[0]) for match in first if match is not None)))
    return told


def _listed_id(told: Mapping[str, str]) -> str:
    """Return the id by which Slurm lists a job: ``ARRAY_INDEX`` for an element of an array."""
    task = told.get("ArrayTaskId", "")
    return f"{told['ArrayJobId']}_{task}" if task.isdecimal() and "ArrayJobId" in told else told["JobId"]


def _is_an_array(job: str, tasks: Sequence[int]) -> str:
    names = ", ".join(f"{job}_{task}" for task in tasks[:_NAMED_TASKS])
    return f"job {job} is an array; name one of its elements, such as {names}"


def _task_folders(places: Iterable[Path]) -> list[int]:
    """Return the indices of the elements of an array, from the folders of their jobs."""
    found = {
        int(path.name.rpartition("_")[2])
        for place in places
        for path in [*place.glob("[0-9]*"), *place.parent.glob(f"{place.name}_[0-9]*")]
        if path.name.rpartition("_")[2].isdecimal() and _is_job_folder(path)
    }
    return sorted(found)


def _first_folder(places: list[Path]) -> JobFolder | None:
    return next((JobFolder(place.resolve()) for place in places if _is_job_folder(place)), None)


def _is_job_folder(path: Path) -> bool:
    folder = JobFolder(path)
    return folder.job_pickle.is_file() and folder.logs.is_dir()
