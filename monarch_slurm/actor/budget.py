"""How often something may fail before it is given up. Pure: times in, decisions out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class RestartLimit:
    """At most ``restarts`` within any ``within`` seconds."""

    restarts: int
    within: float


class RestartBudget:
    """Counts restarts against a limit, and says how long to wait before each.

    Failures that are further apart than the window cost nothing: a job that loses a process every few minutes goes on
    for ever, one that dies at every start is given up.

    Args:
        limit: how many restarts in which time.
        backoff: seconds before the second restart in a row; each further one waits twice as long, up to
            ``max_backoff``. One that held for ``settled`` seconds ends the row: it is not waited for again.
        max_backoff: seconds.
        settled: seconds.
    """

    def __init__(
        self, limit: RestartLimit, backoff: float = 0.0, max_backoff: float = 30.0, settled: float = 5.0
    ) -> None:
        self._limit = limit
        self._backoff = backoff
        self._max_backoff = max_backoff
        self._settled = settled
        self._times: deque[float] = deque()
        self._row = 0

    def use(self, now: float) -> float | None:
        """Count a restart at ``now``; return the seconds to wait before it, or None if there may be no more."""
        while self._times and now - self._times[0] > self._limit.within:
            self._times.popleft()
        if len(self._times) >= self._limit.restarts:
            return None
        in_a_row = bool(self._times) and now - self._times[-1] < self._settled
        self._row = self._row + 1 if in_a_row else 0
        wait = min(self._backoff * 2 ** (self._row - 1), self._max_backoff) if self._row else 0.0
        self._times.append(now + wait)
        return wait

    @property
    def used(self) -> int:
        """Restarts that count at present."""
        return len(self._times)
