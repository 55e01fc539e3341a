"""What a process knows of the ends of others: whom it is pointless to ask, and why."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from monarch_slurm.actor.layout import ActorRef, ProcLayout
from monarch_slurm.actor.messages import ActorDown, ProcsRestart
from monarch_slurm.actor.replies import name_of
from monarch_slurm.host.exits import HostDown, ProcDown
from monarch_slurm.host.places import Places
from monarch_slurm.wire import CONTROLLER, Address

MAX_TOMBSTONES = 10_000
"""Ended actors, processes and hosts that a process remembers the reason of."""


class Tombstones(dict[Any, str]):
    """Reasons of ends; beyond a number, the oldest are forgotten."""

    def __setitem__(self, key: Any, reason: str) -> None:
        super().__setitem__(key, reason)
        if len(self) > MAX_TOMBSTONES:
            del self[next(iter(self))]


class Ends:
    """The ends of processes, hosts and actors that this process was told of. The caller holds the lock.

    Args:
        places: learns which hosts take the places of those that have ended.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._procs = Tombstones()
        self._hosts = Tombstones()
        self._actors = Tombstones()

    def proc(self, down: ProcDown) -> str:
        """Note the end of a proc; return what is said of it."""
        text = (
            down.describe() if not down.expected else f"the process this actor was running on was stopped ({down.exit})"
        )
        self._procs[down.proc] = text
        return text

    def host(self, down: HostDown) -> tuple[bool, frozenset[str], str]:
        """Note the end of a host, and who takes its place.

        Returns:
            Whether this was known before, the ids that stood for the host, and what is said of it.
        """
        again = down.host in self._hosts
        ids = self._places.standing_for(down.host)
        if down.stand_in:
            self._places.move(down.host, down.stand_in)
        for host in ids:
            self._hosts[host] = down.describe()
        return again, ids, down.describe()

    def actor(self, down: ActorDown, process: Address) -> None:
        """Note the end of an actor in ``process``."""
        self._actors[down.mesh, name_of(process)] = down.event

    def restart(self, procs: Collection[str]) -> None:
        """Procs start again: what is known of their actors does not hold any more."""
        for key in [key for key in self._actors if key[1] in procs]:
            del self._actors[key]

    def has_host(self, host: str) -> bool:
        """Return whether ``host`` has ended."""
        return host in self._hosts

    def among(self, layout: ProcLayout, ref: ActorRef | None) -> list[Address]:
        """Return the procs of a mesh that nobody starts again of which the end, or that of their host or of their
        actor of the mesh ``ref``, is known.
        """
        names = [name for name in self._procs if name.rpartition(".")[0] == layout.mesh]
        if ref is not None:
            names += [name for mesh, name in self._actors if mesh == ref.mesh]
        found = [layout.address(int(name.rpartition(".")[2])) for name in names]
        if self._hosts:
            per = layout.per_host
            lost = [i for i, host in enumerate(layout.hosts) if host in self._hosts]
            found += [layout.address(i * per + j) for i in lost for j in range(per)]
        return found

    def why(self, process: Address, ref: ActorRef | None, keeper: Address | None = None) -> str | None:
        """Return why an actor of the mesh ``ref`` in ``process``, or without one the process, cannot answer; None as
        far as is known.

        Args:
            keeper: who starts the process again, so that the end of its host is not that of the process.
        """
        if ref is not None:
            failed = self._actors.get((ref.mesh, name_of(process)))
            if failed is not None:
                return failed
        lasting = keeper or process
        reason = self._procs.get(process.proc) or self._procs.get(lasting.proc) or self._hosts.get(lasting.host)
        return reason and whose(reason, process, ref)


def whose(reason: str, process: Address, ref: ActorRef | None) -> str:
    """Return ``reason`` with the name of the actor of the mesh ``ref`` in ``process``."""
    if ref is None or process == CONTROLLER:
        return reason
    return f"The actor {ref.describe(rank_of(process))} and all its descendants have failed: {reason}"


def why_restarted(restart: ProcsRestart, process: Address, ref: ActorRef | None) -> str:
    """Return what is said to those who wait for an actor whose process is started again."""
    reason = whose(restart.describe(rank_of(process)), process, ref)
    return f"{reason}\nIt was restarted: calls made from now on reach the new actor."


def rank_of(process: Address) -> int:
    """Return the base rank of a proc."""
    return int(process.proc.rpartition(".")[2])
