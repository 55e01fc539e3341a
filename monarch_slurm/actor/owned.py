"""The meshes that instances of this process own, and what their owners are told. No I/O; the caller holds the lock."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from monarch_slurm.actor.context import Instance
from monarch_slurm.actor.errors import MeshFailure
from monarch_slurm.actor.hosts_handle import HostsHandle
from monarch_slurm.actor.layout import ActorRef, ProcLayout
from monarch_slurm.actor.messages import ActorDown, ProcsRestart
from monarch_slurm.actor.ndslice import Slice
from monarch_slurm.actor.shape import Shape
from monarch_slurm.host.exits import FailureKind, HostDown, ProcDown

Notice = tuple[Instance, MeshFailure]
Ranks = Slice | Collection[int]


@dataclass
class OwnedProcs:
    """A proc mesh, seen by its owner.

    Attributes:
        alive: base ranks that have not ended.
        stopping: base ranks that were told to end, so that their end is no failure.
        hosts: the handle of the host mesh that they were spawned through.
    """

    layout: ProcLayout
    shape: Shape
    name: str
    owner: Instance
    alive: set[int]
    hosts: HostsHandle
    stopping: set[int] = field(default_factory=set)


@dataclass
class OwnedActors:
    """An actor mesh, seen by its owner; ``alive`` and ``stopping`` are base ranks of its proc mesh."""

    ref: ActorRef
    actor_class: type
    owner: Instance
    alive: set[int]
    stopping: set[int] = field(default_factory=set)


class OwnedMeshes:
    """What this process owns. Events in, notices to owners out. Meshes of which nothing is left are forgotten."""

    def __init__(self) -> None:
        self.procs: dict[str, OwnedProcs] = {}
        self.actors: dict[str, OwnedActors] = {}

    def of(self, owner: Instance) -> tuple[list[OwnedProcs], list[OwnedActors]]:
        """Return the proc meshes and the actor meshes that ``owner`` owns."""
        procs = [mesh for mesh in self.procs.values() if mesh.owner is owner]
        actors = [mesh for mesh in self.actors.values() if mesh.owner is owner]
        return procs, actors

    def expect_end_of_procs(self, mesh: str, ranks: set[int]) -> None:
        """The end of these procs, and of all actors on them, is no failure from here on."""
        procs = self.procs.get(mesh)
        if procs is not None:
            procs.stopping |= ranks
        for actors in self.actors.values():
            if actors.ref.layout.mesh == mesh:
                actors.stopping |= ranks

    def expect_end_of_host(self, ids: Collection[str]) -> None:
        """The end of everything on the host that ``ids`` stand for is no failure from here on."""
        for layout in self._layouts():
            self.expect_end_of_procs(layout.mesh, layout.ranks_on(ids))

    def expect_end_of_actors(self, mesh: str, ranks: set[int]) -> None:
        """The end of these actors is no failure from here on."""
        actors = self.actors.get(mesh)
        if actors is not None:
            actors.stopping |= ranks

    def proc_down(self, down: ProcDown) -> list[Notice]:
        """A proc has ended: return who is to be told."""
        return self._gone(down.mesh, {down.rank}, down.describe(), down.expected, _details(down))

    def procs_restart(self, restart: ProcsRestart) -> list[Notice]:
        """Procs are started again: return who is to be told."""
        down = restart.down
        details = {**_details(down), "restarted": True, "replaced_by": restart.replaced_by}
        return self._gone(down.mesh, set(restart.ranks), down.describe(), False, details)

    def host_down(self, down: HostDown, ids: Collection[str]) -> list[Notice]:
        """A host, for which ``ids`` stand, is lost: return who is to be told, once per mesh that had ranks there."""
        details: dict[str, Any] = {
            "kind": FailureKind.HOST_LOST,
            "host": down.host_name,
            "detected_at": down.detected_at,
            "replaced_by": down.replaced_by,
        }
        notices: list[Notice] = []
        for layout in self._layouts():
            ranks = layout.ranks_on(ids)
            if ranks and (layout.keeper is None or layout.keeper.host == down.host):
                notices += self._gone(layout.mesh, ranks, down.describe(), False, details)
        return notices

    def actor_down(self, down: ActorDown) -> list[Notice]:
        """An actor has failed or stopped: return who is to be told.

        An actor that fails while it stops is told of, too: its ``__cleanup__`` did not do its work.
        """
        owned = self.actors.get(down.mesh)
        if owned is None or down.base_rank not in owned.alive:
            return []
        owned.alive.discard(down.base_rank)
        self._forget_if_empty(owned)
        if down.kind is None:
            return []
        failure = MeshFailure(
            owned.ref.mesh, (owned.ref.rank_of(down.base_rank),), down.event, down.kind,
            host=down.host, pid=down.pid, traceback=down.traceback, detected_at=time.time(),
        )  # fmt: skip
        return [(owned.owner, failure)]

    def _layouts(self) -> set[ProcLayout]:
        return {mesh.layout for mesh in self.procs.values()} | {mesh.ref.layout for mesh in self.actors.values()}

    def _gone(self, mesh: str, ranks: set[int], event: str, expected: bool, details: dict[str, Any]) -> list[Notice]:
        restarted = details.get("restarted", False)
        notices: list[Notice] = []
        told: set[int] = set()
        for owned in list(self.actors.values()):
            lost = owned.alive & ranks if owned.ref.layout.mesh == mesh else set()
            crashed = lost - owned.stopping
            owned.alive -= lost - crashed if restarted else lost
            self._forget_if_empty(owned)
            if not crashed or expected:
                continue
            text = f"actor {owned.ref.describe(min(crashed))} failed: {event}"
            crashed_ranks = tuple(sorted(owned.ref.rank_of(rank) for rank in crashed))
            notices.append((owned.owner, MeshFailure(owned.ref.mesh, crashed_ranks, text, **details)))
            told.add(id(owned.owner))
        procs = self.procs.get(mesh)
        if procs is not None:
            lost = procs.alive & ranks
            crashed = lost - procs.stopping
            if not restarted:
                procs.alive -= lost
            if not procs.alive:
                del self.procs[mesh]
            if crashed and not expected and id(procs.owner) not in told:
                text = f"proc mesh {procs.name}: {event}"
                notices.append((procs.owner, MeshFailure(procs.layout.mesh, tuple(sorted(crashed)), text, **details)))
        return notices

    def _forget_if_empty(self, owned: OwnedActors) -> None:
        if not owned.alive:
            self.actors.pop(owned.ref.mesh, None)


def all_of(shape: Shape, ranks: set[int]) -> Ranks:
    """Return the ``ranks`` of a shape, as its slice if they are all of them: that costs less to work with."""
    return shape.ndslice if len(ranks) == len(shape.ndslice) else set(ranks)


def _details(down: ProcDown) -> dict[str, Any]:
    return {
        "kind": down.kind,
        "exit": down.exit,
        "host": down.host_name,
        "pid": down.pid,
        "stderr_tail": tuple(down.stderr_tail),
        "traceback": down.traceback or None,
        "detected_at": down.detected_at,
    }
