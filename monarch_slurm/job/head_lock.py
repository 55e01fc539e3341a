"""Which process is the head of a job: Slurm may start one job twice, when slurmctld or a node comes back from a crash.

The head writes ``head.json`` into the job's folder, anew every `BEAT_SECONDS`. Who finds a file that changes gives way
to its writer; who finds one that does not change for `SILENCE_SECONDS`, or that is of an earlier start of the job (by
``SLURM_RESTART_COUNT``), takes its place. A head whose file has become another's ends itself: it was cut off, or
stopped, while Slurm had started the job elsewhere. Locks of the file system would do less: not every shared file system
has them, and none tells who is there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from monarch_slurm.job.errors import JobError
from monarch_slurm.job.folder import tell_once
from monarch_slurm.owned_files import FileRefusedError, json_object, read_data, write_whole

logger = logging.getLogger(__name__)

HEAD_FILE = "head.json"

BEAT_SECONDS = 2.0
SILENCE_SECONDS = 15.0
"""Longer than any shared file system shows old content."""

_LOOK_SECONDS = 0.5
_LATEST = 1e11  # seconds since the epoch: more has no date


class SecondHeadError(JobError):
    """Another process is the head of this job; the text names it."""


@dataclass(frozen=True)
class HeadProcess:
    """Who says to be the head.

    Attributes:
        id: of this start of this process.
        restarts: how often Slurm had started the job again.
        started: seconds since the epoch.
        beat: counts up.
    """

    id: str
    node: str
    pid: int
    restarts: int
    started: float
    beat: int = 0

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        return f"pid {self.pid} on node {self.node} since {since}"


class HeadLock:
    """Makes this process the head of the job in ``folder``, or finds out that another one is.

    Args:
        node: name of this node.
        restarts: ``SLURM_RESTART_COUNT``.
    """

    def __init__(self, folder: Path, node: str, restarts: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = folder / HEAD_FILE
        self._clock = clock
        self._me = HeadProcess(uuid.uuid4().hex, node, os.getpid(), restarts, time.time())
        self._beat = 0
        self._next_beat = 0.0

    def take(self, sleep: Callable[[float], object] = time.sleep) -> None:
        """Become the head; takes `SILENCE_SECONDS` if another one was, and ended without a word.

        Raises:
            SecondHeadError: another one is.
        """
        try:
            other = self._read()
            if other is not None and other.restarts >= self._me.restarts:
                self._wait_for_silence(other, sleep)
            elif other is not None:
                logger.warning("taking the place of an earlier start of this job, %s", other)
            self._write()
            if other is not None:
                sleep(_LOOK_SECONDS)  # of two that do so at the same time the later one stays
            self._check()
        except (OSError, FileRefusedError) as error:
            raise SecondHeadError(f"cannot tell who is the head of this job from {self._path}: {error}") from error

    def beat(self) -> None:
        """Say that this head lives; to be called often.

        Raises:
            SecondHeadError: another one has taken its place.
        """
        now = self._clock()
        if now < self._next_beat:
            return
        self._next_beat = now + BEAT_SECONDS
        try:
            self._check()
            self._write()
        except (OSError, FileRefusedError) as error:  # a file system that has its troubles is no other head
            logger.warning("cannot look at %s: %s", self._path, error)

    def release(self) -> None:
        """Leave the place, if it is still ours."""
        with contextlib.suppress(OSError, FileRefusedError):
            other = self._read()
            if other is not None and other.id == self._me.id:
                self._path.unlink(missing_ok=True)

    def _wait_for_silence(self, other: HeadProcess, sleep: Callable[[float], object]) -> None:
        logger.warning("another process was the head of this job, %s; waiting to see whether it lives", other)
        deadline = self._clock() + SILENCE_SECONDS
        while self._clock() < deadline:
            sleep(_LOOK_SECONDS)
            now = self._read()
            if now is None:
                return
            if now != other:
                raise SecondHeadError(
                    f"this job runs already: its head is {now}. Slurm has started it a second time, here (pid "
                    f"{self._me.pid} on node {self._me.node}); this second start ends"
                )

    def _check(self) -> None:
        other = self._read()
        if other is not None and other.id != self._me.id:
            raise SecondHeadError(
                f"this process (pid {self._me.pid} on node {self._me.node}) is no longer the head of the job: another "
                f"start of it, {other}, has taken its place"
            )

    def _read(self) -> HeadProcess | None:
        return _read(self._path)

    def _write(self) -> None:
        self._beat += 1
        write_whole(self._path, json.dumps({**asdict(self._me), "beat": self._beat}).encode())


def read_head(folder: Path) -> HeadProcess | None:
    """Return who says to be the head of the job in ``folder``; None if nobody does, or it cannot be read."""
    try:
        return _read(folder / HEAD_FILE)
    except FileRefusedError as error:
        tell_once(str(error))
        return None


def _read(path: Path) -> HeadProcess | None:
    try:
        told = json_object(path, read_data(path))
    except FileNotFoundError:
        return None
    kinds: dict[str, tuple[type, ...]] = {
        "id": (str,), "node": (str,), "pid": (int,), "restarts": (int,), "started": (int, float), "beat": (int,),
    }  # fmt: skip
    if told.keys() != kinds.keys() or not all(type(told[name]) in kinds[name] for name in kinds):
        raise FileRefusedError(f"{path} does not tell who is the head of the job")
    if not abs(told["started"]) < _LATEST:
        raise FileRefusedError(f"{path} tells a time that makes no sense: {told['started']}")
    return HeadProcess(**told)
