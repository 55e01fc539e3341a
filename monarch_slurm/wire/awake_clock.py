"""The time in which this process ran. Whoever judges others by their silence measures it with this clock."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_PAUSE = 0.2
"""Seconds between two ticks that count in full. A process that takes longer was stopped, starved of its CPU or held
up."""


class AwakeClock:
    """A monotonic clock that does not advance while this process is stopped or held up.

    It advances at its ticks only. A process that was stopped between two of them, wherever it was at that moment, has
    heard nobody in that time, and the clock counts `LONGEST_PAUSE` of it at most.

    Args:
        clock: returns seconds; never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self.now = 0.0
        """Seconds until the last tick."""

    def tick(self, waited: float = 0.0) -> float:
        """Advance to the present, and return the time.

        Args:
            waited: seconds since the last tick that this process wanted to sleep; they count in full.
        """
        present = self._clock()
        self.now += min(present - self._last, waited + LONGEST_PAUSE)
        self._last = present
        return self.now
