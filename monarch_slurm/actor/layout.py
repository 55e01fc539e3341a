"""Which proc of a mesh is where. Small enough to travel in every reference."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from monarch_slurm.actor.shape import Shape
from monarch_slurm.wire import CONTROLLER, Address


@dataclass(frozen=True)
class ProcLayout:
    """The procs of one proc mesh, by rank in the mesh as it was spawned.

    Attributes:
        mesh: id of the proc mesh, unique in the job.
        hosts: host ids; ``per_host`` consecutive ranks are on each. Another host may stand for one of them by now.
        keeper: the process that spawned them and starts them again by their restart policy; None if they have none.
    """

    mesh: str
    hosts: tuple[str, ...]
    per_host: int
    keeper: Address | None = None

    def to_fields(self) -> list[Any]:
        """Return this as plain values."""
        return [self.mesh, list(self.hosts), self.per_host, self.keeper]

    @staticmethod
    def from_fields(fields: list[Any]) -> ProcLayout:
        """Return what `to_fields` was called on."""
        mesh, hosts, per_host, keeper = fields
        return ProcLayout(mesh, tuple(hosts), per_host, Address(*keeper) if keeper is not None else None)

    def address(self, rank: int) -> Address:
        """Return the address of the proc with base rank ``rank``."""
        host = self.hosts[rank // self.per_host]
        return CONTROLLER if host == CONTROLLER.host else Address(host, f"{self.mesh}.{rank}")

    def by_host(self, ranks: Iterable[int]) -> dict[str, list[int]]:
        """Group base ranks by the host they are on."""
        groups: dict[str, list[int]] = {}
        for rank in ranks:
            groups.setdefault(self.hosts[rank // self.per_host], []).append(rank)
        return groups

    def ranks_on(self, hosts: Collection[str]) -> set[int]:
        """Return the base ranks that are on one of ``hosts``."""
        per = self.per_host
        return {i * per + j for i, name in enumerate(self.hosts) if name in hosts for j in range(per)}


@dataclass(frozen=True)
class ActorRef:
    """What a process must know to reach an actor mesh, and what it is called in reports.

    Attributes:
        mesh: id of the actor mesh, unique in the job.
        name: name given at spawn.
        layout: where its procs are.
        shape: the ranks that it was spawned on.
        display: ``<root>.<module.Class name{...}>`` chain of its owner, for reports.
        class_name: ``module.Class``.
    """

    mesh: str
    name: str
    layout: ProcLayout
    shape: Shape
    display: str
    class_name: str

    def rank_of(self, base_rank: int) -> int:
        """Return the rank in this mesh of the actor on the proc with ``base_rank``."""
        return self.shape.ndslice.index(base_rank)

    def describe(self, base_rank: int) -> str:
        """Return what reports call the actor on the proc with ``base_rank``."""
        point = self.shape.point(base_rank)
        return f"{self.display}.<{self.class_name} {self.name}{point}>"
