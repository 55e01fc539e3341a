"""What every way of transfer offers, and what it is given to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from monarch_slurm.rdma.errors import RDMAError, RDMATimeoutError
from monarch_slurm.rdma.memory import Stager


@dataclass(frozen=True)
class Target:
    """A buffer of another process, as its holders know it. The key proves the right to reach it: never print it."""

    slot: int
    key: int
    slot_address: int
    address: int
    nbytes: int
    mapping: tuple[int, int, int] | None = None
    """Descriptor in the owner, offset and size of the file behind the memory, if it has one that can be mapped."""


class Op(NamedTuple):
    """One copy between local memory and the first ``nbytes`` of ``target``.

    The local memory lies at ``address`` of the host, or of a device if it has a ``stager``.
    """

    write: bool
    address: int
    nbytes: int
    target: Target
    anchor: object | None = None
    stager: Stager | None = None


class Begun:
    """Transfers that are under way without a thread of their own. Whoever waits first sees them through.

    Args:
        wait: returns when all are complete, on any number of threads; None if they are.
        end: gives back what they hold; called once, after that.
    """

    def __init__(self, wait: Callable[[], object] | None, end: Callable[[], object]) -> None:
        self._wait = wait
        self._end = end
        self._lock = threading.Lock()
        self._over = False
        self._then: Callable[[RDMAError | None], None] = lambda failure: None

    @property
    def is_complete(self) -> bool:
        """Whether `finish` returns at once."""
        return self._wait is None

    def then(self, told: Callable[[RDMAError | None], None]) -> Begun:
        """Have ``told`` called with what went wrong, once, by whoever finishes; return this object."""
        before = self._then

        def both(failure: RDMAError | None) -> None:
            before(failure)
            told(failure)

        self._then = both
        return self

    def finish(self) -> None:
        """Wait until all are complete; the first to come back ends them. For any thread."""
        failure = None
        if self._wait is not None:
            try:
                self._wait()
            except Exception as error:  # of the device; whoever waits must hear of it
                failure = RDMAError(f"unexpected: {error!r}")
        with self._lock:
            if self._over:
                return
            self._over = True
        self._end()
        self._then(failure)


class Engine(Protocol):
    """One way of transfer to one peer."""

    name: str
    takes_devices: bool
    """Whether local memory may be a device's, and the targets are."""

    def transfer(self, ops: Sequence[Op], deadline: float) -> None:
        """Do all ``ops``; return when all are complete.

        Raises:
            RDMAError: some failed; the others may or may not be complete.
        """

    def lost(self, reason: str) -> None:
        """The peer is gone: end what waits for it. For any thread."""

    def close(self) -> None:
        """Give back what the engine holds."""


def remaining(deadline: float) -> float:
    """Return the seconds until ``deadline`` on the monotonic clock.

    Raises:
        RDMATimeoutError: there are none left.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise RDMATimeoutError("the transfer was not complete within its timeout")
    return left
