"""Proc meshes: processes that actors are spawned on."""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar, cast

from monarch_slurm.actor.actor import Actor
from monarch_slurm.actor.actor_mesh import ActorMesh, check_class
from monarch_slurm.actor.context import Instance, context, is_own, publish, set_children_maker, set_proc_mesh_maker
from monarch_slurm.actor.endpoint import NO_TENSORS, uses_loop
from monarch_slurm.actor.errors import SupervisionError
from monarch_slurm.actor.future import Future
from monarch_slurm.actor.guests import check_own
from monarch_slurm.actor.layout import ActorRef, ProcLayout
from monarch_slurm.actor.log_options import check_logging, set_logging
from monarch_slurm.actor.mesh_trait import ShapedMesh
from monarch_slurm.actor.messages import creator_to_fields, ref_to_fields
from monarch_slurm.actor.mock import get_actor_class
from monarch_slurm.actor.owned import OwnedActors
from monarch_slurm.actor.replies import CountDown
from monarch_slurm.actor.shape import Point, Shape
from monarch_slurm.config import settings
from monarch_slurm.wire import CONTROLLER, dumps, loads
from monarch_slurm.wire.pickle_fault import explain

T = TypeVar("T", bound=Actor)

HostMaker = Callable[[str, str], Any]
_host_maker: HostMaker | None = None


def set_host_maker(make: HostMaker) -> None:
    """Say how the mesh of one host is made of its id and its program; host meshes are defined on top of this module."""
    global _host_maker
    _host_maker = make


class _Stops:
    """Which procs were told to stop, for a mesh and all slices of it in this process."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()


class ProcMesh(ShapedMesh):
    """Processes with labelled ranks. Slices and pickled copies refer to the same ones; only their spawner owns them."""

    def __init__(
        self,
        layout: ProcLayout,
        shape: Shape,
        name: str,
        ready: Future[bool] | None = None,
        stops: _Stops | None = None,
    ) -> None:
        self._layout = layout
        self._mesh_shape = shape
        self._name = name
        self._ready = ready
        self._stops = stops or _Stops()
        self._stopped: Future[None] | None = None

    _program = ""
    """The other program that it belongs to."""

    @classmethod
    def _reference(cls, layout: ProcLayout, shape: Shape, program: str = "") -> ProcMesh:
        mesh = cls(layout, shape, layout.mesh)
        mesh._program = program
        return mesh

    @property
    def _shape(self) -> Shape:
        return self._mesh_shape

    def _new_with_shape(self, shape: Shape) -> ProcMesh:
        mesh = ProcMesh(self._layout, shape, self._name, self._ready, self._stops)
        mesh._program = self._program
        return mesh

    @property
    def initialized(self) -> Future[bool]:
        """Resolves when every proc runs and its bootstrap is through; raises what went wrong.

        Raises:
            RuntimeError: this is a reference that came from another process.
        """
        if self._ready is None:
            raise RuntimeError("only the process that spawned a mesh can wait for its initialization")
        return self._ready

    @property
    def host_mesh(self) -> Any:
        """The host of a mesh of one proc.

        Raises:
            NotImplementedError: the mesh has more procs than one.
        """
        if len(self._shape) != 1:
            raise NotImplementedError("host_mesh is defined for a mesh of one proc; slice it down to one")
        host = self._layout.hosts[self._shape.ndslice.offset // self._layout.per_host]
        assert _host_maker is not None
        if not is_own(self._program):
            return _host_maker(host, self._program)
        return _host_maker(context().actor_instance.runtime.local_host if host == CONTROLLER.host else host, "")

    def spawn(self, name: str, Class: type[T], *args: Any, **kwargs: Any) -> T:  # noqa: N803 - Monarch's name
        """Start one actor per proc and return their mesh, without waiting for ``__init__``.

        The calling actor owns the mesh: it is told of failures, and the mesh ends with it.

        Raises:
            ValueError: ``Class`` is no Actor, or its endpoints do not fit together.
            TypeError: the arguments do not fit its ``__init__``, or do not pickle.
            RuntimeError: the mesh has been stopped, or belongs to another program.
        """
        check_own(self._program, "spawn actors on procs")
        Class = cast(type[T], get_actor_class(Class))  # noqa: N806 - Monarch's name
        asynchronous = check_arguments(Class, args, kwargs)
        if self._has_stopped():
            raise RuntimeError("`ProcMesh` has already been stopped")
        try:
            body = dumps((Class, args, kwargs))
        except Exception as error:
            parts = {Class.__qualname__: Class, "args": args, "kwargs": kwargs}
            explain(error, parts, f"to spawn {name!r} with")
            raise
        owner = context().actor_instance
        runtime = owner.runtime
        class_name = f"{Class.__module__}.{Class.__qualname__}"
        ref = ActorRef(runtime.new_mesh_id(name), name, self._layout, self._shape, owner.display, class_name)
        ndslice = self._shape.ndslice
        runtime.own_actors(OwnedActors(ref, Class, owner, set(ndslice)))
        ready: Future[None] = Future._pending()
        one_made = CountDown(len(ndslice), lambda: ready._resolve(lambda: None))
        ready._what = lambda: f"the __init__ of actors {name!r}: {one_made.left} of {len(ndslice)} still run"

        def arrived(rank: int, status: str, frames: Any) -> None:
            one_made()

        def lost(rank: int, reason: str) -> None:
            ready._fail(SupervisionError(reason))

        port = runtime.expect_from(ref, self._layout, ndslice, arrived, lost, durable=True)
        fields = {
            "ref": ref_to_fields(ref),
            "creator": creator_to_fields(owner),
            "asynchronous": asynchronous,
            "ready": port,
        }
        runtime.spawn_actors(ref, ndslice, fields, body)
        return ActorMesh(Class, ref, self._shape, ready)  # type: ignore[return-value]

    def stop(self, reason: str = "stopped by client") -> Future[None]:
        """End all actors (their cleanups run), then the processes; resolves when they are gone. Begins at once.

        A process that does not end within the setting ``process_exit_timeout`` (seconds) is killed. Of a slice only its
        own processes end. Stopping again is harmless.

        Raises:
            RuntimeError: the mesh belongs to another program.
        """
        check_own(self._program, "stop procs")
        if self._stopped is None:
            future: Future[None] = Future._pending()
            future._what = f"stop() of {self!r}"
            self._stopped = future
            self._stops.ranks.update(self._shape.ndslice)
            timeout = settings().process_exit_timeout
            runtime = context().actor_instance.runtime
            runtime.stop_procs(self._layout, self._shape.ndslice, timeout, lambda: future._resolve(lambda: None))
        return self._stopped

    async def logging_option(
        self,
        stream_to_client: bool = False,
        aggregate_window_sec: int | None = None,
        level: int = logging.INFO,
    ) -> None:
        """Say what becomes of the lines that these procs print from now on, and what Python's loggers there let pass.

        Lines of stdout and stderr, log records among them, are printed by the program on its own stdout and stderr. It
        never makes a proc wait: lines that the program does not read in time are left out there, with their number,
        and are in the logs of the hosts. When this returns, lines that were said before have been printed.

        Args:
            stream_to_client: whether the program prints the lines, too. On its own machine, only the program does.
            aggregate_window_sec: seconds for which lines are collected, so that those which are equal but for their
                numbers are printed once for all ranks: ``[8 similar log lines] ...``. None prints each at once.
            level: level of the root loggers of the procs, 0 to 255.

        Raises:
            ValueError: there is no such level.
            RuntimeError: a window without a stream, or the mesh belongs to another program.
        """
        check_own(self._program, "change the logging of procs")
        check_logging(stream_to_client, aggregate_window_sec, level)
        await set_logging(self._layout, self._shape.ndslice, stream_to_client, aggregate_window_sec, level)
        context().actor_instance.runtime.print_logs()

    def _has_stopped(self) -> bool:
        return not self._stops.ranks.isdisjoint(self._shape.ndslice)

    def _kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the procs of this mesh or slice."""
        check_own(self._program, "send signals to procs")
        runtime = context().actor_instance.runtime
        runtime.ask_agents("kill", self._layout, self._shape.ndslice, signal=number)

    async def __aenter__(self) -> ProcMesh:
        if self._has_stopped():
            raise RuntimeError("`ProcMesh` has already been stopped")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def __enter__(self) -> ProcMesh:
        if self._has_stopped():
            raise RuntimeError("`ProcMesh` has already been stopped")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop().get()

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcMesh._reference, (self._layout, self._mesh_shape, publish(self._program))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcMesh) and (self._layout, self._mesh_shape) == (other._layout, other._mesh_shape)

    def __hash__(self) -> int:
        return hash((self._layout, self._mesh_shape))

    async def sync_workspace(self, workspace: Any, conda: bool = False, auto_reload: bool = False) -> None:
        """Belongs to host meshes.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("code is synchronized to hosts: use HostMesh.sync_workspace")

    def activate(self) -> NoReturn:
        """Refuse: there are no distributed tensors here.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(NO_TENSORS)

    def rank_tensor(self, dim: str | Sequence[str]) -> NoReturn:
        """Refuse, as `activate` does."""
        raise NotImplementedError(NO_TENSORS)

    def rank_tensors(self) -> NoReturn:
        """Refuse, as `activate` does."""
        raise NotImplementedError(NO_TENSORS)

    def to_table(self) -> str:
        """Return a table of the ranks, their coordinates, hosts and procs, for people."""
        lines = [("rank", *self._labels, "host", "proc")]
        for rank, base in enumerate(self._shape.ndslice):
            host = self._layout.hosts[base // self._layout.per_host].partition("#")[0]
            coordinates = map(str, Point(rank, self.extent).values())
            lines.append((str(rank), *coordinates, host, self._layout.address(base).proc))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)

    def __repr__(self) -> str:
        hosts = len(self._layout.by_host(self._shape.ndslice))
        return f"<ProcMesh {self._layout.mesh} {self.extent} on {hosts} host{'s' if hosts > 1 else ''}>"


def check_arguments(actor_class: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Make sure that a class can be spawned with these arguments; return whether its actors run on an event loop.

    Raises:
        ValueError: it is no Actor, or its endpoints do not fit together.
        TypeError: the arguments do not fit its ``__init__``.
    """
    if not (isinstance(actor_class, type) and issubclass(actor_class, Actor)):
        raise ValueError(f"{actor_class!r} must subclass monarch_slurm.actor.Actor to spawn it.")  # noqa: TRY004 - what Monarch raises
    asynchronous = uses_loop(actor_class)
    check_class(actor_class)
    if actor_class.__init__ is not object.__init__:
        inspect.signature(actor_class.__init__).bind(None, *args, **kwargs)
    elif args or kwargs:
        raise TypeError(f"{actor_class.__qualname__}() takes no arguments")
    return asynchronous


def run_bootstrap(frames: Any) -> None:
    """Call the bootstrap function in ``frames``, if there is one, sync or async. In a new proc."""
    function = loads(frames) if frames else None
    if function is not None:
        result = function()
        if inspect.isawaitable(result):
            asyncio.run(_await(result))


async def _await(awaitable: Any) -> Any:
    return await awaitable


SpawnCallback = Callable[[ProcMesh], None]
_spawn_callbacks: list[SpawnCallback] = []
_active: weakref.WeakSet[ProcMesh] = weakref.WeakSet()


def register_proc_mesh_spawn_callback(callback: SpawnCallback) -> None:
    """Call ``callback`` with each proc mesh that this process spawns from now on."""
    _spawn_callbacks.append(callback)


def unregister_proc_mesh_spawn_callback(callback: SpawnCallback) -> None:
    """Call ``callback`` no longer.

    Raises:
        ValueError: it was not registered.
    """
    _spawn_callbacks.remove(callback)


def get_active_proc_meshes() -> list[ProcMesh]:
    """Return the proc meshes that this process has spawned, has not stopped and still refers to."""
    return [mesh for mesh in list(_active) if not mesh._has_stopped()]


def note_spawned(mesh: ProcMesh) -> None:
    """Tell all who asked of a new proc mesh."""
    _active.add(mesh)
    for callback in list(_spawn_callbacks):
        callback(mesh)


def _children(owner: Instance) -> list[ActorMesh[Any] | ProcMesh]:
    procs, actors = owner.runtime.owned_by(owner)
    meshes: list[ActorMesh[Any] | ProcMesh] = [ProcMesh._reference(layout, shape) for layout, shape in procs]
    return meshes + [ActorMesh(actor_class, ref, ref.shape) for actor_class, ref in actors]


set_proc_mesh_maker(ProcMesh._reference)
set_children_maker(_children)
