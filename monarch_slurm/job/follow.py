"""Watching a job from outside: its program's output as it comes, and how it ended."""

from __future__ import annotations

import codecs
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TextIO

from monarch_slurm.job.diagnosis import why_ended
from monarch_slurm.job.errors import JobNotFoundError, SlurmUnreachableError
from monarch_slurm.job.folder import JobFolder
from monarch_slurm.job.status import LONGEST_POLL, NOT_FOUND_GRACE, JobId, JobStatus, Phase, query

LOG_SECONDS = 0.2
"""Pause between two looks at the log."""

FIRST_STATUS_SECONDS = 1.0
"""Pause between the first two questions to Slurm; it grows to `LONGEST_POLL`."""

CHUNK = 1 << 16


class Sink(Protocol):
    """What text can be written to."""

    def write(self, text: str, /) -> object:
        """Take ``text``."""

    def flush(self) -> object:
        """Hand on what was taken."""


class LogReader:
    """Reads what is new in a file that another machine appends to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def copy(self, out: Sink) -> bool:
        """Write what is new to ``out``; return whether there was anything."""
        grown = False
        try:
            with open(self._path, "rb") as file:  # opened anew: NFS looks for new data when a file is opened
                file.seek(self._offset)
                while chunk := file.read(CHUNK):
                    self._offset += len(chunk)
                    out.write(self._decoder.decode(chunk))
                    grown = True
        except FileNotFoundError:
            return False
        if grown:
            out.flush()
        return grown


def print_notice(text: str) -> None:
    """Tell the user something that is not part of the program's output."""
    print(text, file=sys.stderr, flush=True)


def follow_job(
    job_id: JobId,
    folder: JobFolder,
    out: TextIO,
    notice: Callable[[str], None] = print_notice,
    ask: Callable[[JobId], JobStatus] = query,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Copy the program's output to ``out`` until the job has ended; return the program's exit code.

    The code is what the head node wrote into the folder. It is there before Slurm knows that the job has ended.

    Args:
        notice: is called with a line whenever the job's state changes before its program runs.

    Raises:
        JobEndedError: the job ended without an exit code of its program.
        JobFolderError: the job's nodes could not write into its folder.
        JobNotFoundError: Slurm has forgotten the job.
    """
    log = LogReader(folder.controller_log)
    last_notice = ""
    last_seen = clock()
    next_ask, pause = clock(), FIRST_STATUS_SECONDS
    while True:
        code = folder.exit_code()  # before the log is read: all output is written by then
        grown = log.copy(out)
        if code is not None:
            return code
        if clock() >= next_ask and not grown:
            try:
                status = ask(job_id)
                last_seen = clock()
                text = str(status)
                if status.phase is Phase.ENDED:
                    code = _last_look(folder, log, out, clock, sleep)
                    if code is None:
                        raise why_ended(folder, status)
                    return code
            except JobNotFoundError:
                if clock() - last_seen > NOT_FOUND_GRACE:
                    raise
                text = last_notice
            except SlurmUnreachableError as error:
                last_seen = clock()
                text = f"{error}; trying again"
            if text != last_notice:
                notice(text)
                last_notice = text
            next_ask, pause = clock() + pause, min(pause * 1.5, LONGEST_POLL)
        sleep(LOG_SECONDS)


def _last_look(
    folder: JobFolder, log: LogReader, out: TextIO, clock: Callable[[], float], sleep: Callable[[float], None]
) -> int | None:
    """Return the exit code if it shows up yet: a network file system may be seconds late."""
    deadline = clock() + 3.0
    while (code := folder.exit_code()) is None and clock() < deadline and folder.controller_log.exists():
        sleep(LOG_SECONDS)
    log.copy(out)
    return code
