"""Which host takes the place of a lost one. Pure: comings and goings in, verdicts out.

A job's hosts are a `Pool`. Some of them have places in host meshes, the others are spares: those that were asked for as
such, and agents that have come back on the node of a lost host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from monarch_slurm.host.exits import HostDown
from monarch_slurm.host.hub import HostInfo
from monarch_slurm.host.identity import new_host_id
from monarch_slurm.host.places import OnLost

ASKED_FOR = "a host that is asked for"
"""What a place is filled with until the other host has come."""


@dataclass(frozen=True)
class Replacement:
    """One host took the place of another.

    Attributes:
        at: seconds since the epoch.
        cause: of the loss.
        by: name of the host that takes the place, or `ASKED_FOR`.
    """

    at: float
    lost: str
    cause: str
    by: str


@dataclass
class Pool:
    """The hosts of one job.

    Attributes:
        names: names of hosts that belong to it, whether they have a place or are spares.
        placed: ids of the hosts that have places, of lost ones whose place is open, too.
        on_lost: what to do when no spare is left.
        request: asks for one more host in the place of a lost one; with the id of the place, for `StandIns.give_up`.
        unfit: names of hosts that take nobody's place.
        note: told of each lost host that had a place. Must not take long.
    """

    names: set[str]
    placed: set[str]
    on_lost: OnLost = "shrink"
    request: Callable[[HostDown, str], None] | None = None
    unfit: set[str] = field(default_factory=set)
    note: Callable[[HostDown], None] | None = None
    open: dict[str, bool] = field(default_factory=dict)
    """Places that no host has now, those that have waited for longest first, and whether a host was asked for."""


class StandIns:
    """The pools of one program. On one thread."""

    def __init__(self) -> None:
        self._pools: list[Pool] = []
        self._retired: set[str] = set()
        self.replacements: list[Replacement] = []

    def add(self, pool: Pool) -> None:
        """Look after one more job."""
        self._pools.append(pool)

    def remove(self, pool: Pool) -> None:
        """Look after a job no longer."""
        self._pools = [other for other in self._pools if other is not pool]

    def retire(self, hosts: Collection[str]) -> list[str]:
        """Nobody takes the place of these hosts any more; return those of them that are open places."""
        self._retired |= set(hosts)
        opened = []
        for pool in self._pools:
            opened += [place for place in pool.open if place in self._retired]
            pool.open = {place: asked for place, asked in pool.open.items() if place not in self._retired}
        return opened

    def lost(self, down: HostDown, joined: Iterable[HostInfo]) -> tuple[str, str] | None:
        """Return the id and the name of what takes the place of a lost host, if something does.

        Args:
            joined: the hosts that are there.
        """
        pool = next((pool for pool in self._pools if down.host in pool.placed), None)
        if pool is None or down.host in self._retired:
            return None
        if down.host in pool.open:  # the host that was asked for does not come
            pool.open[down.host] = False
            return None
        if pool.note is not None:
            pool.note(down)
        spare = next((info for info in joined if info.host != down.host and self._is_spare(pool, info)), None)
        if spare is not None:
            place, name = spare.host, spare.name
        elif pool.on_lost == "request" and pool.request is not None:
            place, name = new_host_id(down.host_name), ASKED_FOR
            pool.open[place] = True
        else:
            pool.open[down.host] = False
            return None
        pool.placed.discard(down.host)
        pool.placed.add(place)
        self.replacements.append(Replacement(down.detected_at, down.host_name, down.cause, name))
        return place, name

    def fails(self, down: HostDown) -> bool:
        """Return whether the program fails for want of a host in the place of this one."""
        return any(pool.on_lost == "fail" and down.host in pool.open for pool in self._pools)

    def asks(self, place: str) -> Pool | None:
        """Return the pool whose place this is, if a host has to be asked for it."""
        return next((pool for pool in self._pools if pool.open.get(place)), None)

    def fill(self, joined: Iterable[HostInfo], now: float) -> list[tuple[str, HostInfo]]:
        """Return which hosts take which open places from now on.

        Args:
            joined: the hosts that are there.
            now: seconds since the epoch.
        """
        filled = []
        for info in joined:
            for pool in self._pools:
                if pool.open and self._is_spare(pool, info):
                    place = next(iter(pool.open))
                    del pool.open[place]
                    pool.placed.discard(place)
                    pool.placed.add(info.host)
                    self.replacements.append(Replacement(now, place.partition("#")[0], "its place was open", info.name))
                    filled.append((place, info))
                    break
        return filled

    def _is_spare(self, pool: Pool, info: HostInfo) -> bool:
        return (
            info.name in pool.names
            and info.name not in pool.unfit
            and info.host not in self._retired
            and not any(info.host in other.placed for other in self._pools)
        )
