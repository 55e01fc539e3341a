"""Connections to one owner, lent to batches: a small batch does not wait for a large one that has all it can use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from monarch_slurm.rdma.engine import remaining

T = TypeVar("T")


class Lanes(Generic[T]):
    """Things of which each serves one batch at a time. For any thread.

    Args:
        make: makes one; cheap, since it does not connect yet.
        share: how many one batch may have.
        limit: how many there may be; a batch that finds none waits.
    """

    def __init__(self, make: Callable[[], T], share: int, limit: int) -> None:
        self._make = make
        self._share = share
        self._limit = max(share, limit)
        self._changed = threading.Condition()
        self._idle: list[T] = []
        self.all: list[T] = []
        """Every one that was made."""

    def take(self, wanted: int, deadline: float) -> list[T]:
        """Return at least one, and up to ``wanted``: those that idle, new ones within the share of one batch.

        Raises:
            RDMATimeoutError: all were in use until ``deadline`` (on the monotonic clock).
        """
        with self._changed:
            while not self._idle and len(self.all) >= self._limit:
                if not self._changed.wait(remaining(deadline)):
                    remaining(deadline)
            wanted = min(wanted, self._share)
            taken = [self._idle.pop() for _ in range(min(wanted, len(self._idle)))]
            while len(taken) < wanted and (len(self.all) < self._share or not taken):
                taken.append(self._make())
                self.all.append(taken[-1])
        return taken

    def give(self, taken: list[T]) -> None:
        """Give back what was taken."""
        with self._changed:
            self._idle += taken
            self._changed.notify_all()
