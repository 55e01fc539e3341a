"""Which peers may stay at a listener while they have not proved who they are, and one line about those that may not.

A peer has `PROOF_SECONDS` to prove itself. Until then it counts against two limits: that of its origin (an address, or
a user of this machine) and that of the listener. Where a limit is reached, the connection that has waited longest
makes room: an honest peer proves itself within milliseconds, and a flood waits. Processes of this user on this machine
have no limit of their own, since the kernel names their user.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from monarch_slurm.wire.limits import LimitError, descriptors_allowed
from monarch_slurm.wire.origin import Origin
from monarch_slurm.wire.task_limits import start_thread

logger = logging.getLogger(__name__)

PROOF_SECONDS = 10.0
"""How long a connection may take to prove itself."""

MAX_PER_ORIGIN = 64
MAX_UNPROVED = 256
"""Connections that have not proved themselves: of one origin, and of all together."""

LOG_SECONDS = 10.0
"""A listener writes at most one line about strangers in this time."""

GATHER_SECONDS = 1.0
"""How long a line waits for more strangers to tell of."""

_MOST_ORIGINS = 4
"""Origins that a line names; of the others it gives the number."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class _Waiting:
    origin: Origin
    since: float


class Admission(Generic[Key]):
    """Decides which connections without a proof have to go. It opens and closes nothing. For one thread at a time.

    Args:
        per_origin: limit of connections of one origin.
        total: limit of all connections; never more than a quarter of the descriptors of this process.
        is_proved: asked before a connection has to go; for listeners that do not hear of a proof at once.
    """

    def __init__(
        self,
        per_origin: int = MAX_PER_ORIGIN,
        total: int = MAX_UNPROVED,
        is_proved: Callable[[Key], bool] = lambda key: False,
    ) -> None:
        self._per_origin = per_origin
        self._total = max(1, min(total, descriptors_allowed() // 4))
        self._is_proved = is_proved
        self._waiting: dict[Key, _Waiting] = {}  # the oldest first
        self._groups: dict[str, dict[Key, None]] = {}  # of these, too
        self._limited = 0
        """Connections that count against the limits."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: Key) -> bool:
        return key in self._waiting

    def enter(self, key: Key, origin: Origin, now: float) -> list[tuple[Key, Origin]]:
        """Note a new connection; return those that have to be closed for it, which may be the new one itself.

        Args:
            now: seconds, of a clock of the caller's.
        """
        self.forget(key)
        self._waiting[key] = _Waiting(origin, now)
        if origin.is_own:
            return []
        group = self._groups.setdefault(origin.group, {})
        group[key] = None
        self._limited += 1
        closed = self._make_room(group, self._per_origin)
        while self._limited > self._total:
            largest = max(self._groups.values(), key=len)
            # Among many origins with one connection each, those that were first go on.
            victims = self._make_room(largest, len(largest) - 1) if len(largest) > 1 else [self._drop(key)]
            closed += victims
            if any(victim == key for victim, _ in victims):
                break
        return closed

    def forget(self, key: Key) -> Origin | None:
        """Drop a connection that has proved itself, or is gone; return its origin, None if it was not known."""
        return self._drop(key)[1] if key in self._waiting else None

    def origins(self) -> set[Origin]:
        """Return where those that wait come from."""
        return {waiting.origin for waiting in self._waiting.values()}

    def seconds_waited(self, key: Key, now: float) -> float:
        """Return how long a connection has been here; 0 if it is not known."""
        return now - self._waiting[key].since if key in self._waiting else 0.0

    def overdue(self, now: float) -> list[tuple[Key, Origin]]:
        """Return the connections whose time is up, which have to be closed, and drop them."""
        closed = []
        for key, waiting in list(self._waiting.items()):
            if now - waiting.since < PROOF_SECONDS:
                break
            self._drop(key)
            if not self._is_proved(key):
                closed.append((key, waiting.origin))
        return closed

    def forget_proved(self) -> None:
        """Drop those that have proved themselves by now."""
        for key in list(self._waiting):
            if self._is_proved(key):
                self._drop(key)

    def all_unproved(self) -> list[tuple[Key, Origin]]:
        """Return all connections, which have to be closed, and drop them."""
        everybody = [self._drop(key) for key in list(self._waiting)]
        return [(key, origin) for key, origin in everybody if not self._is_proved(key)]

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds until `overdue` has to be asked; None while nobody waits."""
        for waiting in self._waiting.values():
            return max(0.0, waiting.since + PROOF_SECONDS - now)
        return None

    def _make_room(self, group: dict[Key, None], most: int) -> list[tuple[Key, Origin]]:
        closed = []
        while len(group) > most:
            oldest = next(iter(group))
            proved = self._is_proved(oldest)
            entry = self._drop(oldest)
            if not proved:
                closed.append(entry)
        return closed

    def _drop(self, key: Key) -> tuple[Key, Origin]:
        origin = self._waiting.pop(key).origin
        group = self._groups.get(origin.group)
        if group is not None and key in group:
            del group[key]
            self._limited -= 1
            if not group:
                del self._groups[origin.group]
        return key, origin


class StrangerLog:
    """Counts the connections that a listener has refused, and tells of them in one line per `LOG_SECONDS` at most.

    A line is written `GATHER_SECONDS` after the first of them, so that it has the number of a flood. For any thread.

    Args:
        listener: what was connected to, such as ``the controller's port``.
        belongs: what those who may connect have that these lack, such as ``do not hold this job's key``.
    """

    def __init__(self, listener: str, belongs: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.listener = listener
        self._belongs = belongs
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[Origin] = Counter()
        self._details: set[str] = set()
        self._since = 0.0
        self._timer: threading.Timer | None = None
        self._next_line = float("-inf")
        self.refused = 0
        """Connections so far."""

    def note(self, origin: Origin, detail: str = "", number: int = 1) -> None:
        """Count a connection, or ``number`` of them.

        Args:
            detail: what was wrong with it, if that is known.
        """
        with self._lock:
            self.refused += number
            if not self._counts:
                self._since = self._clock()
            self._counts[Origin(origin.address, origin.uid)] += number
            if detail:
                self._details.add(detail)
            if self._timer is None:
                self._timer = threading.Timer(max(GATHER_SECONDS, self._next_line - self._clock()), self.flush)
                self._timer.daemon = True
                try:
                    start_thread(self._timer)
                except LimitError:
                    self._timer = None  # the next one tries again

    def flush(self) -> None:
        """Write the line now, if there is something to tell; for example before the listener closes."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            counts, self._counts = self._counts, Counter()
            details, self._details = self._details, set()
            if not counts:
                return
            seconds = max(1.0, self._clock() - self._since)
            self._next_line = self._clock() + LOG_SECONDS
        number = counts.total()
        named = [f"{count} from {origin}" for origin, count in counts.most_common(_MOST_ORIGINS)]
        if len(counts) > _MOST_ORIGINS:
            named.append(f"{len(counts) - _MOST_ORIGINS} more origins")
        logger.warning(
            "refused %d %s at %s in %.0f s that %s: %s%s",
            number,
            "connection" if number == 1 else "connections",
            self.listener,
            seconds,
            self._belongs,
            ", ".join(named),
            f" ({'; '.join(sorted(details))})" if details else "",
        )
