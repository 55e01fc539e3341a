"""What is in the logs of a job, as a person wants to read it: some lines of some files, and what is added to them."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TextIO

from monarch_slurm.job.errors import JobNotFoundError, SlurmUnreachableError
from monarch_slurm.job.follow import FIRST_STATUS_SECONDS, LOG_SECONDS, print_notice
from monarch_slurm.job.head_news import HeadNews
from monarch_slurm.job.log_reader import LogReader, Sink
from monarch_slurm.job.status import LONGEST_POLL, NOT_FOUND_GRACE, JobStatus, Phase, query

_FILE_OF_A_PROC = re.compile(r"(.+)\.([^.]+)\.([0-9]+)\.log")
_OF_A_PROC = re.compile(r"\[\S+ (\S+) ([0-9]+)\] ")


class LogView:
    """Copies what is new in files to ``out``.

    Args:
        ranks: only lines of procs of these ranks; none for all lines.
        mesh: only those of the procs that were spawned under this name.
        last: only the last so many lines of what is there at the first look; None for all.
        proc_logs: folder of files of procs, whose lines are shown as in the log of a host; None for none.
        hosts: only procs of these hosts; none for all.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        out: TextIO,
        *,
        ranks: Collection[int] = (),
        mesh: str | None = None,
        last: int | None = None,
        proc_logs: Path | None = None,
        hosts: Collection[str] = (),
    ) -> None:
        self._out = out
        self._ranks = ranks
        self._mesh = mesh
        self._held: deque[str] | None = None if last is None else deque(maxlen=last)
        self._whole_lines = bool(ranks) or last is not None
        self._proc_logs = proc_logs
        self._hosts = hosts
        self._known: set[Path] = set()
        self._readers = [(LogReader(path), _Lines(self._take)) for path in paths]

    def copy(self, final: bool = False) -> bool:
        """Write what is new, lines without an end only if ``final``; return whether there was anything."""
        grown = False
        if self._proc_logs is not None:
            self._add_proc_logs(self._proc_logs)
        for reader, lines in self._readers:
            out: Sink = lines if self._whole_lines or lines.prefix else self._out
            grown |= reader.copy(out)
            if final:
                lines.finish()
        if self._held is not None:
            self._out.write("".join(self._held))
            self._held = None
        self._out.flush()
        return grown

    def _add_proc_logs(self, folder: Path) -> None:
        for path in sorted(set(folder.glob("*.log")) - self._known):
            self._known.add(path)
            match = _FILE_OF_A_PROC.fullmatch(path.name)
            if match is not None and (not self._hosts or match[1] in self._hosts):
                prefix = f"[{match[1]} {match[2]} {match[3]}] "
                self._readers.append((LogReader(path), _Lines(self._take, prefix)))

    def _take(self, line: str) -> None:
        if self._ranks:
            match = _OF_A_PROC.match(line)
            if match is None or int(match[2]) not in self._ranks or not self._is_of_mesh(match[1]):
                return
        if self._held is not None:
            self._held.append(line)
        else:
            self._out.write(line)

    def _is_of_mesh(self, name: str) -> bool:
        # Names of meshes end with something that makes them unlike others.
        return self._mesh is None or name == self._mesh or name.rpartition("-")[0] == self._mesh


class _Lines:
    """Gives whole lines to ``take``, each with ``prefix`` before it."""

    def __init__(self, take: Callable[[str], None], prefix: str = "") -> None:
        self._take = take
        self.prefix = prefix
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._take(f"{self.prefix}{line}\n")
        return len(text)

    def flush(self) -> None:
        """Do nothing: what has no end yet waits for it."""

    def finish(self) -> None:
        if self._rest:
            self._take(f"{self.prefix}{self._rest}\n")
            self._rest = ""


def copy_logs(view: LogView) -> None:
    """Write all that is there."""
    view.copy(final=True)


def follow_logs(
    job_id: str,
    view: LogView,
    has_ended: Callable[[], bool] = lambda: False,
    head: HeadNews | None = None,
    notice: Callable[[str], None] = print_notice,
    ask: Callable[[str], JobStatus] = query,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Write what is there and what is added until the job has ended.

    Args:
        has_ended: tells before Slurm does whether nothing more will be added.
        head: what is new of the head of the job goes to ``notice``, too.
        notice: is called with a line whenever the state of a job that does not run yet has changed.

    Raises:
        JobNotFoundError: Slurm knows nothing of the job.
    """
    said = ""
    last_seen = next_ask = clock()
    pause = FIRST_STATUS_SECONDS
    over = False
    while not over:
        over = has_ended()
        for text in head.news() if head is not None else ():
            notice(f"job {job_id}: {text}")
            next_ask, pause = clock(), FIRST_STATUS_SECONDS
        if not over and clock() >= next_ask:
            text = ""
            try:
                status = ask(job_id)
                last_seen = clock()
                over = status.phase is Phase.ENDED
                text = str(status) if status.phase is Phase.WAITING else ""
            except JobNotFoundError:
                if clock() - last_seen > NOT_FOUND_GRACE:
                    raise
            except SlurmUnreachableError as error:
                last_seen = clock()
                text = f"{error}; trying again"
            if text and text != said:
                notice(text)
            said = text
            next_ask, pause = clock() + pause, min(pause * 1.5, LONGEST_POLL)
        view.copy(final=over)
        if not over:
            sleep(LOG_SECONDS)
