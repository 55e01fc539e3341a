"""What procs leave in ``/dev/shm`` when they are killed, and who removes it.

Two kinds of processes clean up after the one that has started them: the resource tracker of Python's multiprocessing
(names ``psm_*`` and ``sem.*``, which tell no pid) and torch's ``torch_shm_manager``. They are given the time to do so.
The names of torch's own segments begin with ``torch_PID_``; those that name a dead process of this host's procs are
removed by its agent.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

CLEANER_SECONDS = 2.0
"""Time for processes that clean up after a dead proc; they take milliseconds."""

_FOLDER = Path("/dev/shm")  # noqa: S108 - where shm_open(3) has its files
_NAME = re.compile(r"torch_(\d+)_")
_CLOCK_MARGIN = 1.0
"""Seconds by which the times of files and of this process may differ."""


def cleans_up(pid: int) -> bool:
    """Return whether process ``pid`` cleans up shared memory after others; such processes end by themselves."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            arguments = file.read().split(b"\0")
    except OSError:
        return False
    return arguments[0].endswith(b"/torch_shm_manager") or any(
        argument.startswith(b"from multiprocessing.resource_tracker import main") for argument in arguments
    )


class SharedMemoryFiles:
    """Removes torch's segments of dead processes.

    A segment is removed when it is this user's, names a process that was noted, was made in that process's lifetime,
    and no process of this machine has it open or mapped. The last holds in all PID namespaces, so that a container
    which shares ``/dev/shm``, but not its pids, keeps what it uses.

    Args:
        folder: where the segments are.
    """

    def __init__(self, folder: Path = _FOLDER) -> None:
        self._folder = folder
        self._dead: dict[int, tuple[float, float]] = {}

    def note(self, pid: int, started: float, ended: float | None = None) -> None:
        """Process ``pid`` has ended.

        Args:
            started: when it was started at the earliest, in seconds since the epoch.
            ended: when it has ended; None for now.
        """
        self._dead[pid] = (started, time.time() if ended is None else ended)

    def sweep(self) -> None:
        """Remove what can be removed now; what others still use is left for a later call."""
        if not self._dead:
            return
        kept = set()
        for path, pid in self._segments():
            started, ended = self._dead[pid]
            try:
                facts = path.lstat()
                mine = facts.st_uid == os.geteuid()
                if mine and started - _CLOCK_MARGIN <= facts.st_ctime <= ended + _CLOCK_MARGIN:
                    if _is_in_use(path):
                        kept.add(pid)
                    else:
                        path.unlink()
            except OSError:
                continue  # somebody else has removed it, or it cannot be opened
        self._dead = {pid: times for pid, times in self._dead.items() if pid in kept}

    def _segments(self) -> Iterable[tuple[Path, int]]:
        try:
            names = os.listdir(self._folder)
        except OSError:  # there is no such folder
            return
        for name in names:
            match = _NAME.match(name)
            if match and int(match[1]) in self._dead:
                yield self._folder / name, int(match[1])


def _is_in_use(path: Path) -> bool:
    """Return whether any process has the file open or mapped: only then the kernel refuses a lease (fcntl(2)).

    Raises:
        OSError: it cannot be opened.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return True  # or the kernel knows no leases on this file system: left alone, too
    else:
        return False
    finally:
        os.close(fd)  # which ends the lease
