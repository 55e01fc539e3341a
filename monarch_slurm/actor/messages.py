"""What goes between the runtimes of a job, as plain values: only arguments and results are ever pickled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from monarch_slurm.actor.context import CreatorInstance, Instance
from monarch_slurm.actor.layout import ActorRef, ProcLayout
from monarch_slurm.actor.ndslice import Slice
from monarch_slurm.actor.shape import Extent, Point, Shape
from monarch_slurm.host.exits import FailureKind, ProcDown
from monarch_slurm.wire import Address, Message

PortAddress = tuple[str, str, int]
"""Host, proc and number of a port."""

PLAIN_METHOD, EXPLICIT_PORT = 1, 2
"""Flags of a call through `as_endpoint`: the method has no decorator; it takes a response port."""


class Call:
    """One message to an actor: which method, for which slice, and where the answer goes."""

    __slots__ = ("_place", "body", "method", "plain", "port", "receipt", "src", "view")

    def __init__(self, message: Message) -> None:
        fields = message.fields
        self.method: str = fields["method"]
        port = fields["port"]
        self.port: PortAddress | None = tuple(port) if port else None
        receipt = fields.get("receipt")
        self.receipt: PortAddress | None = tuple(receipt) if receipt else None
        """Hears that the message has come, where there is no answer that would tell."""
        self.view: tuple[list[str], int, list[int], list[int]] = fields["view"]
        self.plain: int = fields["plain"]
        self.src = message.src
        self.body = message.body
        self._place: Point | None = None

    @property
    def asker(self) -> Address | None:
        """The process that is told if nobody takes this."""
        waiting = self.port or self.receipt
        return Address(*waiting[:2]) if waiting is not None else None

    def place(self, base_rank: int) -> Point:
        """Return the place, in the slice that this was sent to, of the one actor here that it is for."""
        if self._place is None:
            labels, offset, sizes, strides = self.view
            rank = Slice(offset=offset, sizes=sizes, strides=strides).index(base_rank)
            self._place = Point(rank, Extent(labels, sizes))
        return self._place


@dataclass(frozen=True)
class ActorDown:
    """An actor's end, as its process tells it.

    Attributes:
        mesh: id of the actor mesh; ``base_rank`` is the rank of its proc, or -1 if the process never had such an actor.
        event: what happened, for people.
        traceback: of the Python exception that ended it, if one did.
        kind: what failed; None if it just stopped.
        host: name of its host; ``pid`` is its process id there.
    """

    mesh: str
    base_rank: int
    event: str
    traceback: str | None
    kind: FailureKind | None
    host: str
    pid: int

    def __post_init__(self) -> None:
        if self.kind is not None:
            object.__setattr__(self, "kind", FailureKind(self.kind))  # a message has its value

    @property
    def failed(self) -> bool:
        """Whether it did not just stop."""
        return self.kind is not None


@dataclass(frozen=True)
class ProcsRestart:
    """Procs that have ended or are being ended, and will be started again: one failed, the others for its sake.

    Attributes:
        down: the end of the one that failed.
        ranks: all of them, in the proc mesh ``down.mesh``.
        replaced_by: name of the host where they start, if that on which all of them were is lost.
        incarnation: the last that has ended; those that start have higher numbers.
    """

    down: ProcDown
    ranks: tuple[int, ...]
    replaced_by: str = ""
    incarnation: int = 0

    @property
    def procs(self) -> list[str]:
        """Names of the procs."""
        return [f"{self.down.mesh}.{rank}" for rank in self.ranks]

    def describe(self, rank: int) -> str:
        """Return what became of one of them, for people."""
        if rank == self.down.rank or self.down.kind is FailureKind.HOST_LOST:
            return replace(self.down, rank=rank, proc=f"{self.down.mesh}.{rank}").describe()
        return (
            f"its process (proc {self.down.mesh}.{rank}) was ended by the restart policy of its mesh, "
            f"for rank {self.down.rank} failed: {self.down.describe()}"
        )

    def to_fields(self) -> dict[str, Any]:
        """Return this as plain values."""
        return {
            "down": self.down.to_fields(),
            "ranks": list(self.ranks),
            "replaced_by": self.replaced_by,
            "incarnation": self.incarnation,
        }

    @staticmethod
    def from_fields(fields: dict[str, Any]) -> ProcsRestart:
        """Return what `to_fields` was called on."""
        down = ProcDown(**fields["down"])
        return ProcsRestart(down, tuple(fields["ranks"]), fields["replaced_by"], fields["incarnation"])


def ref_to_fields(ref: ActorRef) -> list[Any]:
    """Return ``ref`` as plain values."""
    ndslice = ref.shape.ndslice
    shape = [ref.shape.labels, ndslice.offset, ndslice.sizes, ndslice.strides]
    return [ref.mesh, ref.name, ref.layout.to_fields(), shape, ref.display, ref.class_name]


def ref_from_fields(fields: list[Any]) -> ActorRef:
    """Return what `ref_to_fields` was given."""
    mesh, name, layout, (labels, offset, sizes, strides), display, class_name = fields
    shape = Shape(labels, Slice(offset=offset, sizes=sizes, strides=strides))
    return ActorRef(mesh, name, ProcLayout.from_fields(layout), shape, display, class_name)


def creator_to_fields(owner: Instance) -> list[Any]:
    """Return what a spawned actor gets to know of the one that spawned it, as plain values."""
    rank = owner.rank
    return [owner.name, owner.class_name, rank.rank, rank.extent.labels, rank.extent.sizes, owner.display]


def creator_from_fields(fields: list[Any], address: Address) -> CreatorInstance:
    """Return what `creator_to_fields` was given, by the process ``address``."""
    name, class_name, rank, labels, sizes, display = fields
    return CreatorInstance(name, class_name, Point(rank, Extent(labels, sizes)), display, address)
