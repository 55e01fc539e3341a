"""When a host that the one above does not reach is to be linked to it (again). No I/O, and no clock but heartbeats.

A link that breaks is made again after a while, as most breaks are of a moment: an agent was slow, a connection was
reset. The while doubles with each attempt, and begins anew when a link has proved good: something has come through it,
and it has held longer than the last while.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_BEATS = 1024
"""Between two attempts are no more heartbeats than these."""


@dataclass
class _State:
    """One host: the number of its last attempt, heartbeats between that or a break and the next, when that is due (None
    while it is linked, or nobody is above it), and when it was linked."""

    number: int
    wait: int
    due: int | None = None
    linked_at: int = 0


class Relinking:
    """The links of one job.

    Args:
        first_wait: heartbeats between a break and the first attempt after it.
    """

    def __init__(self, first_wait: int) -> None:
        self._first = first_wait
        self._now = 0
        self._states: dict[str, _State] = {}

    def attempt(self, host: str) -> int:
        """``host`` is about to be linked: return the number of this attempt."""
        state = self._states.setdefault(host, _State(0, self._first))
        if state.number:
            state.wait = min(2 * state.wait, MOST_BEATS)
        state.number += 1
        state.due = self._now + state.wait
        return state.number

    def is_last(self, host: str, number: int) -> bool:
        """Return whether ``number`` is that of the last attempt to link ``host``."""
        return host in self._states and self._states[host].number == number

    def made(self, host: str) -> None:
        """``host`` is linked."""
        state = self._states[host]
        state.due, state.linked_at = None, self._now

    def broken(self, host: str, proved: bool) -> None:
        """``host`` is linked no longer.

        Args:
            proved: something has come through the link.
        """
        state = self._states[host]
        if proved and self._now - state.linked_at > state.wait:
            state.wait = self._first
        state.due = self._now + state.wait

    def given_up(self, host: str) -> None:
        """There is nobody that ``host`` could be linked to."""
        if host in self._states:
            self._states[host].due = None

    def forget(self, host: str) -> None:
        """``host`` is gone."""
        self._states.pop(host, None)

    def beat(self) -> list[str]:
        """To be called once per heartbeat: return the hosts that are to be linked now."""
        self._now += 1
        return [host for host, state in self._states.items() if state.due is not None and state.due <= self._now]
