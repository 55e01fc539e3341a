"""What somebody who follows a job can learn of its head from the job's folder, long before Slurm notices a loss."""

from __future__ import annotations

import re
from collections.abc import Callable

from monarch_slurm.job.folder import JobFolder
from monarch_slurm.job.head_lock import BEAT_SECONDS, SILENCE_SECONDS, HeadProcess, read_head
from monarch_slurm.job.log_reader import LogReader

_WARNING = re.compile(r"(?:\S+ \S+ (?:WARNING|ERROR) monarch_slurm\.\S+|monarch_slurm: \S+): (.+)")
"""A line of batch.log that is for the user: of the supervisor of the program, or of another node of the job."""


class HeadNews:
    """Tells what is new of the head of a job.

    Args:
        clock: seconds, of this process.
        from_now: leave out the warnings that there are already.
    """

    def __init__(self, folder: JobFolder, clock: Callable[[], float], from_now: bool = False) -> None:
        self._folder = folder
        self._clock = clock
        self._head: HeadProcess | None = None
        self._changed_at = self._next_look = clock()
        self._log = LogReader(folder.batch_log)
        self._lines = _Lines()
        self._last_warning = ""
        self.silent_node = ""
        """Name of the head node while nothing is heard from it."""
        if from_now:
            self._warnings()

    def news(self) -> list[str]:
        """Return the lines for the user that have come up since the last call."""
        return [*self._warnings(), *self._of_head()]

    def _warnings(self) -> list[str]:
        if self._is_one_log():
            return []
        self._log.copy(self._lines)
        found = []
        for line in self._lines.take():
            match = _WARNING.fullmatch(line)
            if match is not None and match[1] != self._last_warning:  # several nodes may say the same
                self._last_warning = match[1]
                found.append(match[1])
        return found

    def _is_one_log(self) -> bool:
        """Return whether the program's output has these lines, too, as in a job of a template."""
        return self._folder.batch_log.is_symlink()

    def _of_head(self) -> list[str]:
        now = self._clock()
        if now < self._next_look:
            return []
        self._next_look = now + BEAT_SECONDS
        head, before = read_head(self._folder.path), self._head
        if head is None or head != before:
            was_silent, self.silent_node = self.silent_node, ""
            self._head, self._changed_at = head, now
            if head is not None and before is not None and head.id != before.id:
                return [f"the job has started again (restart {head.restarts}); its head is node {head.node}"]
            if head is not None and was_silent:
                return [f"head node {head.node} is heard from again"]
            return []
        silence = now - self._changed_at
        if self.silent_node or silence < SILENCE_SECONDS:
            return []
        self.silent_node = head.node
        return [
            f"nothing was heard from head node {head.node} for {silence:.0f} s: it is lost, cut off or stopped. Slurm "
            "notices a loss after its SlurmdTimeout (300 s unless set); the other nodes then end the job, or have it "
            "start again if it was submitted with --requeue"
        ]


class _Lines:
    def __init__(self) -> None:
        self._text = ""

    def write(self, text: str) -> None:
        self._text += text

    def flush(self) -> None:
        """Do nothing: lines are taken when they are whole."""

    def take(self) -> list[str]:
        *lines, self._text = self._text.split("\n")
        return lines
