"""The small jobs that a job has submitted for more nodes: nothing of them is left in the queue when it ends."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

from monarch_slurm.job.errors import NoSlurmError, SlurmUnreachableError
from monarch_slurm.job.folder import JobFolder
from monarch_slurm.job.head import ask_quickly
from monarch_slurm.owned_files import FileRefusedError, read_data

logger = logging.getLogger(__name__)


def requests_folder(folder: JobFolder) -> Path:
    """Return the folder of the small jobs' own folders."""
    return folder.path / "more"


def new_request_folder(folder: JobFolder) -> JobFolder:
    """Make and return a folder for one more small job; there may be those of an earlier start of the job."""
    base = requests_folder(folder)
    base.mkdir(mode=0o700, exist_ok=True)
    for number in itertools.count(1):
        try:
            (base / str(number)).mkdir(mode=0o700)
        except FileExistsError:
            continue
        break
    made = JobFolder(base / str(number))
    made.logs.mkdir(mode=0o700)
    return made


def cancel_waiting(folder: JobFolder) -> None:
    """Cancel those that still wait in the queue; those that run end with their hosts."""
    _cancel(folder, "--state=PENDING")


def cancel_all(folder: JobFolder) -> None:
    """Cancel all of them."""
    _cancel(folder)


def _cancel(folder: JobFolder, *options: str) -> None:
    jobs = list(filter(None, map(_job_id, sorted(requests_folder(folder).glob("*/job_id")))))
    if not jobs:
        return
    try:
        ask_quickly(["scancel", "--quiet", *options, *jobs])
    except (NoSlurmError, SlurmUnreachableError) as error:
        logger.warning("cannot cancel jobs %s: %s", ", ".join(jobs), error)


def _job_id(path: Path) -> str:
    """Return the number of a job that a file holds; empty, and a line of the log, if it holds none."""
    try:
        text = read_data(path).decode(errors="replace").strip()
    except (FileRefusedError, FileNotFoundError) as error:
        logger.warning("a job of this one may be left in the queue: %s", error)
        return ""
    if not (text.isascii() and text.isdecimal()):
        logger.warning("a job of this one may be left in the queue: %s holds no number of a job", path)
        return ""
    return text
