"""Which host a host id stands for now: references to a lost host stay valid when another takes its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

OnLost = Literal["shrink", "request", "fail"]
"""What becomes of a lost host's place when no spare is left: it stays empty until a host comes, another host is asked
for and waited for, or the program fails."""


class Places:
    """The hosts that have taken the place of others, by id. Written by one thread, read by any."""

    def __init__(self) -> None:
        self._now: dict[str, str] = {}

    def move(self, old: str, new: str) -> None:
        """From now on ``old``, and what stood for it, stands for ``new``."""
        new = self.now(new)
        if new != old:
            for host, now in list(self._now.items()):
                if now == old:
                    self._now[host] = new
            self._now[old] = new

    def now(self, host: str) -> str:
        """Return the id of the host that ``host`` stands for."""
        return self._now.get(host, host)

    def standing_for(self, host: str) -> frozenset[str]:
        """Return the ids that stand for ``host`` now, its own included."""
        return frozenset([host, *(old for old, now in list(self._now.items()) if now == host)])

    def table(self) -> dict[str, str]:
        """Return this as plain values, for `update`."""
        return dict(self._now)

    def update(self, table: Mapping[str, str]) -> None:
        """Take in what another process knows."""
        self._now.update(table)
