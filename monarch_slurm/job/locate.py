"""From what a person types to the job: its number or its folder, whoever has submitted it and from where."""

from __future__ import annotations

import os
import re
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
_FIELD = re.compile(r"\b(UserId|StdOut|WorkDir|ArrayTaskId|JobName)=(\S*)")
_USER = re.compile(r"(.*)\(([0-9]+)\)")


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
    here = [Path(base) / job for base in (log_dir, DEFAULT_LOG_DIR) if base is not None]
    try:
        told = _ask_slurm(job, run)
    except (NoSlurmError, SlurmUnreachableError):
        if (folder := _first_folder(here)) is None:
            raise
        return FoundJob(job, folder)
    if told is None:
        if (folder := _first_folder(here)) is None:
            raise JobNotFoundError(f"Slurm knows no job {job} (any more), and there is no {here[0]}")
        return FoundJob(job, folder)
    told_places = [Path(told["StdOut"]).parent] if "StdOut" in told else []
    told_places += [Path(told["WorkDir"]) / DEFAULT_LOG_DIR / job] if "WorkDir" in told else []
    if (folder := _first_folder([*told_places, *here])) is None:
        raise JobFolderError(
            f"job {job} ({told.get('JobName', '')}) was not started by monarch_slurm, or its folder is gone; its "
            f"output: {told.get('StdOut', 'unknown')}"
        )
    return FoundJob(job, folder)


def my_jobs(run: Run = run_command) -> tuple[list[ListedJob], int]:
    """Return this user's jobs of ours that have not ended, and the number of those that are not ours.

    Raises:
        NoSlurmError, SlurmUnreachableError
    """
    done = run(["squeue", "-h", "-r", "-u", str(os.getuid()), "-o", "%i|%T|%M|%L|%N|%r|%j"])
    if done.returncode != 0:
        raise slurm_failure(done, "squeue failed", run)
    found, others = [], 0
    for line in done.stdout.splitlines():
        job, state, elapsed, left, nodes, reason, name = line.split("|", 6)
        try:
            place = find_job(job, run=run)
        except (JobFolderError, JobNotFoundError):
            others += 1
        else:
            reason = "" if reason == "None" else reason
            found.append(ListedJob(place, name, state, elapsed, left, nodes, reason))
    return found, others


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
    lines = done.stdout.strip().splitlines()
    told = dict(_FIELD.findall(lines[0])) if lines else {}
    user = _USER.fullmatch(told.get("UserId", ""))
    if user is not None and int(user[2]) != os.getuid():
        raise JobNotFoundError(f"job {job} belongs to {user[1]}, not to you")
    if "ArrayTaskId" in told and "_" not in job:
        raise JobNotFoundError(f"job {job} is an array; name one of its tasks, such as {job}_0")
    return told or None


def _first_folder(places: list[Path]) -> JobFolder | None:
    return next((JobFolder(place.resolve()) for place in places if _is_job_folder(place)), None)


def _is_job_folder(path: Path) -> bool:
    folder = JobFolder(path)
    return folder.job_pickle.is_file() and folder.logs.is_dir()
