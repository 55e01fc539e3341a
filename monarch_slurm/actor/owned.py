"""The meshes that instances of this process own, and what their owners are told. No I/O; the caller holds the lock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from monarch_slurm.actor.context import Instance
from monarch_slurm.actor.errors import MeshFailure
from monarch_slurm.actor.layout import ActorRef, ProcLayout
from monarch_slurm.host.exits import HostDown, ProcDown

Notice = tuple[Instance, MeshFailure]


@dataclass
class OwnedProcs:
    """A proc mesh, seen by its owner."""

    layout: ProcLayout
    name: str
    owner: Instance
    alive: set[int]
    stopping: bool = False
    on_empty: list[Callable[[], None]] = field(default_factory=list)


@dataclass
class OwnedActors:
    """An actor mesh, seen by its owner."""

    ref: ActorRef
    owner: Instance
    alive: set[int]
    stopping: bool = False


class OwnedMeshes:
    """What this process owns. Events in, notices to owners out."""

    def __init__(self) -> None:
        self.procs: dict[str, OwnedProcs] = {}
        self.actors: dict[str, OwnedActors] = {}

    def of(self, owner: Instance) -> tuple[list[OwnedProcs], list[OwnedActors]]:
        """Return the proc meshes and the actor meshes that ``owner`` owns."""
        procs = [mesh for mesh in self.procs.values() if mesh.owner is owner]
        actors = [mesh for mesh in self.actors.values() if mesh.owner is owner]
        return procs, actors

    def proc_down(self, down: ProcDown) -> list[Notice]:
        """A proc has ended: return who is to be told."""
        failure = {
            "exit": down.exit,
            "host": down.host_name,
            "pid": down.pid,
            "stderr_tail": tuple(down.stderr_tail),
            "detected_at": down.detected_at,
        }
        return self._gone(down.mesh, {down.rank}, down.describe(), down.expected, failure)

    def host_down(self, down: HostDown) -> list[Notice]:
        """A host is lost: return who is to be told, once per mesh that had ranks there."""
        failure = {"host": down.host_name, "detected_at": down.detected_at}
        notices: list[Notice] = []
        layouts = {mesh.layout for mesh in self.procs.values()} | {mesh.ref.layout for mesh in self.actors.values()}
        for layout in layouts:
            ranks = {
                host * layout.per_host + i
                for host, name in enumerate(layout.hosts)
                if name == down.host
                for i in range(layout.per_host)
            }
            if ranks:
                notices += self._gone(layout.mesh, ranks, down.describe(), False, failure)
        return notices

    def actor_down(self, mesh: str, base_rank: int, event: str, traceback: str | None, failed: bool) -> list[Notice]:
        """An actor has failed or stopped by itself: return who is to be told."""
        owned = self.actors.get(mesh)
        if owned is None or base_rank not in owned.alive:
            return []
        owned.alive.discard(base_rank)
        if owned.stopping or not failed:
            return []
        rank = owned.ref.rank_of(base_rank)
        return [(owned.owner, MeshFailure(owned.ref.mesh, (rank,), event, traceback=traceback))]

    def _gone(self, mesh: str, ranks: set[int], event: str, expected: bool, details: dict[str, object]) -> list[Notice]:
        notices: list[Notice] = []
        told: set[int] = set()
        procs = self.procs.get(mesh)
        expected = expected or (procs is not None and procs.stopping)
        for owned in self.actors.values():
            lost = owned.alive & ranks if owned.ref.layout.mesh == mesh else set()
            owned.alive -= lost
            if not lost or owned.stopping or expected:
                continue
            crashed = tuple(sorted(owned.ref.rank_of(rank) for rank in lost))
            text = f"actor {owned.ref.describe(min(lost))} failed: {event}"
            notices.append((owned.owner, MeshFailure(owned.ref.mesh, crashed, text, **details)))  # type: ignore[arg-type]
            told.add(id(owned.owner))
        if procs is not None:
            lost = procs.alive & ranks
            procs.alive -= lost
            if lost and not expected and id(procs.owner) not in told:
                text = f"proc mesh {procs.name}: {event}"
                failure = MeshFailure(procs.layout.mesh, tuple(sorted(lost)), text, **details)  # type: ignore[arg-type]
                notices.append((procs.owner, failure))
            if not procs.alive:
                callbacks, procs.on_empty = procs.on_empty, []
                for callback in callbacks:
                    callback()
        return notices
