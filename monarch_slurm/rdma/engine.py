"""What every way of transfer offers, and what it is given to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from monarch_slurm.rdma.errors import RDMAError, RDMATimeoutError
from monarch_slurm.rdma.memory import Stager


@dataclass(frozen=True, repr=False)
class Target:
    """A buffer of another process, as its holders know it. The key proves the right to reach it: never print it."""

    slot: int
    key: int
    slot_address: int
    address: int
    nbytes: int
    mapping: tuple[int, int, int] | None = None
    """Descriptor in the owner, offset and size of the file behind the memory, if it has one that can be mapped."""

    def __repr__(self) -> str:
        return f"<Target {self.slot}, {self.nbytes} bytes>"


class Op(NamedTuple):
    """One copy between local memory and ``nbytes`` of ``target``.

    The local memory lies at ``address`` of the host, or of a device if it has a ``stager``. In the target it begins at
    ``offset``, which is 0 unless `bounce` has cut the copy.
    """

    write: bool
    address: int
    nbytes: int
    target: Target
    anchor: object | None = None
    stager: Stager | None = None
    offset: int = 0


class Begun:
    """Transfers that are under way without a thread of their own: a thread that waits for them sees them through.

    Args:
        wait: returns when all are complete, on any number of threads; None if they are.
        end: gives back what they hold; called once, after that.
    """

    def __init__(self, wait: Callable[[], object] | None, end: Callable[[], object]) -> None:
        self._wait = wait
        self._end = end
        self._lock = threading.Lock()
        self._over = False
        self._somebody_waits = False
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
        """Wait until all are complete, and end them; the first of several threads does. Not to be torn by a signal."""
        self._somebody_waits = True
        self._end_with(self._wait_for_all())

    def finish_for_nobody(self) -> None:
        """As `finish`, on a thread that does nothing else: it leaves them to a thread that waits already."""
        if not self._somebody_waits:
            failure = self._wait_for_all()
            if not self._somebody_waits:
                self._end_with(failure)

    def _wait_for_all(self) -> RDMAError | None:
        try:
            if self._wait is not None:
                self._wait()
        except Exception as error:  # of the device; whoever waits must hear of it
            return RDMAError(f"unexpected: {error!r}")
        return None

    def _end_with(self, failure: RDMAError | None) -> None:
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
        """Give back what the engine holds. Nothing uses it any more."""


def remaining(deadline: float) -> float:
    """Return the seconds until ``deadline`` on the monotonic clock.

    Raises:
        RDMATimeoutError: there are none left.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise RDMATimeoutError("the transfer was not complete within its timeout")
    return left
