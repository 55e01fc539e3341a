"""Watching a job from outside: its program's output as it comes, and how it ended."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from typing import TextIO

from monarch_slurm.job.diagnosis import why_ended
from monarch_slurm.job.errors import JobNotFoundError, SlurmUnreachableError
from monarch_slurm.job.folder import JobFolder
from monarch_slurm.job.head_news import HeadNews
from monarch_slurm.job.log_reader import LogReader
from monarch_slurm.job.node_states import describe_nodes, node_states
from monarch_slurm.job.notice import SAVED
from monarch_slurm.job.status import LONGEST_POLL, NOT_FOUND_GRACE, JobId, JobStatus, Phase, answers_within, query

LOG_SECONDS = 0.2
"""Pause between two looks at the log."""

NODE_SECONDS = 5.0
"""Time for Slurm's answer about the head node."""

FIRST_STATUS_SECONDS = 1.0
"""Pause between the first two questions to Slurm; it grows to `LONGEST_POLL`."""


def print_notice(text: str) -> None:
    """Tell the user something that is not part of the program's output."""
    print(text, file=sys.stderr, flush=True)


def describe_exit(code: int) -> str:
    """Return what the exit code of a program means."""
    if code == SAVED:
        return f"exit code {code}: it was asked to end, and has saved its state"
    try:
        name = signal.Signals(code - 128).name if code > 128 else ""
    except ValueError:  # a real-time signal, or no signal
        name = ""
    return f"exit code {code}" + (f" (killed by {name})" if name else "")


def node_text(name: str) -> str:
    """Return what Slurm says of a node; empty if it does not answer."""
    return describe_nodes(node_states(answers_within(NODE_SECONDS), [name]).values())


def follow_job(
    job_id: JobId,
    folder: JobFolder,
    out: TextIO,
    notice: Callable[[str], None] = print_notice,
    ask: Callable[[JobId], JobStatus] = query,
    ask_node: Callable[[str], str] = lambda name: node_text(name),
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Copy the program's output to ``out`` until the job has ended; return the program's exit code.

    The code is what the head node wrote into the folder. It is there before Slurm knows that the job has ended.

    Args:
        notice: is called with a line for the user whenever the job's state changes, its head falls silent or starts
            again, the job's supervisor has a warning, and when the program has failed.
        ask_node: returns what Slurm says of a node; it is asked while the head is silent.

    Raises:
        JobEndedError: the job ended without an exit code of its program.
        JobFolderError: the job's nodes could not write into its folder.
        JobNotFoundError: Slurm has forgotten the job.
    """
    log = LogReader(folder.controller_log)
    head = HeadNews(folder, clock)
    last_notice = ""
    last_seen = clock()
    next_ask, pause = clock(), FIRST_STATUS_SECONDS
    while True:
        code = folder.exit_code()  # before the log is read: all output is written by then
        grown = log.copy(out)
        for text in head.news():
            notice(f"job {job_id}: {text}")
            next_ask, pause = clock(), FIRST_STATUS_SECONDS
        if code is not None:
            if code:
                notice(f"job {job_id}: its program ended with {describe_exit(code)}; its files are in {folder.path}")
            return code
        if clock() >= next_ask and not grown:
            try:
                status = ask(job_id)
                last_seen = clock()
                text = str(status)
                if head.silent_node and status.phase is Phase.RUNNING and (said := ask_node(head.silent_node)):
                    text += f"; {said}"
                if status.phase is Phase.ENDED:
                    code = _last_look(folder, log, out, clock, sleep)
                    if code is None:
                        raise why_ended(folder, status)
                    continue
            except JobNotFoundError:
                if clock() - last_seen > NOT_FOUND_GRACE:
                    raise
                text = last_notice
            except SlurmUnreachableError as error:
                last_seen = clock()
                text = f"{error}; trying again"
            if text != last_notice:
                notice(text)
                last_notice, pause = text, FIRST_STATUS_SECONDS  # where something changes, more will
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
