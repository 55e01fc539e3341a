"""Who is running: the actor instance of the current thread or task, and the rank that its message was sent to."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from monarch_slurm.actor.errors import MeshFailure
from monarch_slurm.actor.ids import CLIENT, ActorAddr, actor_uid, proc_id
from monarch_slurm.actor.layout import ActorRef, ProcLayout
from monarch_slurm.actor.ndslice import Slice
from monarch_slurm.actor.shape import Extent, Point, Shape
from monarch_slurm.actor.undeliverable import UndeliverableMessageEnvelope
from monarch_slurm.wire import Address

if TYPE_CHECKING:
    from monarch_slurm.actor.actor_mesh import ActorMesh
    from monarch_slurm.actor.proc_mesh import ProcMesh
    from monarch_slurm.actor.runtime import Runtime

_NOWHERE = Point(0, Extent((), ()))


class Body(Protocol):
    """What runs an instance: a cell, or the client for the root."""

    hears_undeliverable: bool
    """Whether it wants to know of messages that have not come to their receiver."""

    def undeliverable(self, message: UndeliverableMessageEnvelope) -> None:
        """Tell it of such a message. For any thread."""

    def supervise(self, failure: MeshFailure) -> None:
        """Tell the owner that a mesh of its has failed. For any thread."""

    def end(self, reason: str, failed: bool) -> None:
        """Stop the instance, gracefully or as a failure. For any thread."""


@dataclass(frozen=True)
class CreatorInstance:
    """The actor that spawned another, as the spawned one knows it."""

    name: str
    class_name: str
    rank: Point
    display: str
    address: Address

    def __repr__(self) -> str:
        return self.display


@dataclass(eq=False)
class Instance:
    """One running actor (or the client, ``<root>``): who it is, where, and what it owns.

    Attributes:
        name: name given at spawn; ``"root"`` for the client.
        class_name: ``module.Class``.
        rank: place in the mesh as it was spawned; it does not change with the slice a message is sent to.
        creator: who spawned it; None for the client.
        display: ``<root>.<module.Class name{...}>``, its place in the supervision tree.
    """

    runtime: Runtime
    body: Body
    name: str
    class_name: str
    rank: Point
    creator: CreatorInstance | None
    display: str
    ref: ActorRef | None
    base_rank: int

    @property
    def key(self) -> str:
        """What names this instance inside its process: its actor mesh's id, or ``"root"``."""
        return self.ref.mesh if self.ref else "root"

    @property
    def actor_id(self) -> ActorAddr:
        """Unique name of this actor, with its proc and host."""
        host, proc = self.runtime.address
        return ActorAddr(actor_uid(self.ref.mesh) if self.ref else CLIENT, proc_id(proc), host)

    @property
    def proc_id(self) -> str:
        """Unique name of the proc that it runs in."""
        return str(self.actor_id.proc_id)

    @property
    def _children(self) -> list[ActorMesh[Any] | ProcMesh]:
        """The meshes that it has spawned and of which something is left."""
        return _make_children(self) if _make_children is not None else []

    @property
    def proc(self) -> ProcMesh:
        """The mesh of the one proc that it runs in."""
        layout, _ = self._home()
        assert _make_proc_mesh is not None
        return _make_proc_mesh(layout, Shape((), Slice(offset=self.base_rank, sizes=(), strides=())))

    @property
    def proc_mesh(self) -> ProcMesh:
        """The proc mesh that it was spawned on."""
        assert _make_proc_mesh is not None
        return _make_proc_mesh(*self._home())

    def _home(self) -> tuple[ProcLayout, Shape]:
        if self.ref is not None:
            return self.ref.layout, self.ref.shape
        assert self.runtime.home is not None
        return self.runtime.home[:2]

    def stop(self, reason: str | None = None) -> None:
        """Stop this actor once the messages that it has are handled; no failure."""
        self.body.end(reason or "no reason provided", failed=False)

    def kill(self, reason: str | None = None) -> None:
        """End this actor as a failure that its owner is told of, with ``reason`` in the report."""
        self.body.end(reason or "no reason provided", failed=True)

    abort = kill

    def __repr__(self) -> str:
        return self.display

    __str__ = __repr__


@dataclass(frozen=True)
class Context:
    """The current actor and the rank that the current message was sent to."""

    actor_instance: Instance
    message_rank: Point


_current: contextvars.ContextVar[Context | None] = contextvars.ContextVar("monarch_slurm_context", default=None)
"""That of the running actor; on threads of the program that have called `context`, that of the client."""

_boot_client: Callable[[], Instance] | None = None
_proc_runtime: Runtime | None = None
_program = ""
_admit_guests: Callable[[], None] = lambda: None  # noqa: E731
_make_proc_mesh: Callable[[ProcLayout, Shape], ProcMesh] | None = None
_make_children: Callable[[Instance], list[ActorMesh[Any] | ProcMesh]] | None = None


def set_context(context: Context | None) -> None:
    """Make ``context`` the current one of this thread or task; None: no actor runs."""
    _current.set(context)


def set_client_boot(boot: Callable[[], Instance] | None) -> None:
    """Say how the root instance is made when code outside of any actor asks for its context."""
    global _boot_client
    _boot_client = boot


def set_proc_runtime(runtime: Runtime) -> None:
    """Say which runtime this process has, as a proc."""
    global _proc_runtime
    _proc_runtime = runtime


def process_runtime() -> Runtime:
    """Return the runtime of this process, on any of its threads."""
    return _proc_runtime if _proc_runtime is not None else context().actor_instance.runtime


def may_boot_client() -> bool:
    """Return whether this process may have a root instance, which procs may not."""
    return _boot_client is not None


def set_program(program: str, admit_guests: Callable[[], None] = lambda: None) -> None:
    """Say which program this process belongs to: the public key of its controller.

    Args:
        admit_guests: lets processes of other programs join; called when the first reference leaves this process.
    """
    global _program, _admit_guests
    _program, _admit_guests = program, admit_guests


def is_own(program: str) -> bool:
    """Return whether a reference of ``program`` is one of the program that this process belongs to."""
    return program in ("", _program)


def publish(program: str) -> str:
    """Return the program that a reference belongs to, for its pickle; empty stands for that of this process."""
    global _admit_guests
    if not is_own(program):
        return program
    admit, _admit_guests = _admit_guests, lambda: None
    admit()
    return _program


def set_proc_mesh_maker(make: Callable[[ProcLayout, Shape], ProcMesh]) -> None:
    """Say how the proc meshes are made that `Instance` gives out; they are defined on top of this module."""
    global _make_proc_mesh
    _make_proc_mesh = make


def set_children_maker(make: Callable[[Instance], list[ActorMesh[Any] | ProcMesh]]) -> None:
    """Say how the meshes that an instance owns are made; they are defined on top of this module."""
    global _make_children
    _make_children = make


def current_instance() -> Instance | None:
    """Return the running actor, or None outside of any; starts nothing."""
    current = current_context()
    return current.actor_instance if current is not None else None


def context() -> Context:
    """Return the context of the running actor; outside of any, that of the client, which starts with the first call."""
    current = current_context()
    if current is None:
        if _boot_client is None:
            raise RuntimeError("this thread belongs to no actor; pass what you need from the endpoint that started it")
        client = _boot_client()  # raises where the client that this thread has used cannot be used any more
        current = _current.get()
        if current is None or current.actor_instance is not client:
            current = Context(client, _NOWHERE)
            _current.set(current)
    return current


def current_context() -> Context | None:
    """Return the context of the running actor; None outside of any."""
    current = _current.get()
    return None if current is None or current.actor_instance.ref is None else current


def acting_instance() -> Instance | None:
    """Return the running actor, or the client on threads of the program that have called `context`; starts nothing."""
    current = _current.get()
    return current.actor_instance if current is not None else None


def current_rank() -> Point:
    """Return the place of this actor in the mesh slice that the current message was sent to."""
    return context().message_rank


def current_size() -> dict[str, int]:
    """Return the sizes of the mesh slice that the current message was sent to."""
    return dict(context().message_rank.extent)


def current_actor_name() -> str:
    """Return the unique name of the current actor."""
    return str(context().actor_instance.actor_id)
