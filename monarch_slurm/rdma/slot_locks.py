"""Locks on slots of an owner's table of buffers, which its drops wait for; a process that dies gives its up."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable

from monarch_slurm.rdma.errors import RDMAError, RDMATimeoutError

_FLOCK = struct.Struct("hhqqi4x")
_F_OFD_SETLK = 37
"""From Linux's fcntl.h: locks of an open file, not of a process; Python 3.10 does not name it."""


class SlotLocks:
    """Shared locks on slots of one owner. For any thread; each slot is locked while any holds it.

    Args:
        fd: of the owner's lock file, opened anew for this object.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._held: dict[int, int] = {}
        """By slot: how many hold it. Locks of one open file do not exclude each other; to unlock would be for all."""

    def take(self, wanted: Iterable[int], deadline: float) -> list[int]:
        """Lock slots, and no others, until `give`; return what to give.

        Raises:
            RDMATimeoutError: the owner holds one of them until ``deadline`` (on the monotonic clock).
        """
        slots = sorted(set(wanted))
        _patiently(self._try, slots, deadline)
        return slots

    def _try(self, slots: list[int]) -> None:
        held = self._held
        with self._lock:
            new = [slot for slot in slots if slot not in held]
            taken: list[tuple[int, int]] = []
            try:
                for run in _runs(new):
                    _set(self._fd, fcntl.F_RDLCK, *run)
                    taken.append(run)
            except BaseException:
                for run in taken:
                    _set(self._fd, fcntl.F_UNLCK, *run)
                raise
            for slot in slots:
                held[slot] = held.get(slot, 0) + 1

    def give(self, slots: list[int]) -> None:
        """Give back what `take` has returned."""
        held = self._held
        with self._lock:
            free = []
            for slot in slots:
                held[slot] -= 1
                if held[slot] == 0:
                    del held[slot]
                    free.append(slot)
            for run in _runs(free):
                _set(self._fd, fcntl.F_UNLCK, *run)

    def close(self) -> None:
        """Close the file. Nothing must hold a slot."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def wait_for_others(fd: int, slot: int, deadline: float) -> None:
    """Return once no other process holds ``slot``, as the owner, whose own ``fd`` it is.

    Raises:
        RDMATimeoutError: one does until ``deadline`` (on the monotonic clock).
    """
    _patiently(lambda slots: _set(fd, fcntl.F_WRLCK, slots[0], slots[0] + 1), [slot], deadline)
    _set(fd, fcntl.F_UNLCK, slot, slot + 1)


def _patiently(attempt: Callable[[list[int]], None], slots: list[int], deadline: float) -> None:
    wait = 0.0005
    while True:
        try:
            attempt(slots)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                text = f"buffers {', '.join(map(str, slots[:9]))} are still in use by another process"
                raise RDMATimeoutError(text) from None
            time.sleep(wait)
            wait = min(0.02, wait * 2)
        except OSError as error:
            raise RDMAError(f"cannot lock the table of buffers: {error.strerror}") from None


def _runs(slots: list[int]) -> list[tuple[int, int]]:
    """Return first and end of each run of adjacent ``slots``, which are sorted: 300 tensors are one lock."""
    if not slots or slots[-1] - slots[0] == len(slots) - 1:
        return [(slots[0], slots[-1] + 1)] if slots else []
    runs = []
    start = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            runs.append((slots[start], slots[index - 1] + 1))
            start = index
    return runs


def _set(fd: int, kind: int, first: int, end: int) -> None:
    fcntl.fcntl(fd, _F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, first, end - first, 0))
