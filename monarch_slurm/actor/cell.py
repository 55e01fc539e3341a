"""A running actor: its queue, its thread, its life.

One message is handled at a time. Control items (failures of owned meshes, an abort) go before queued messages and are looked at between
messages. A graceful stop goes through the queue, so what was sent before it is still handled.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import queue
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monarch_slurm.actor.context import Context, CreatorInstance, Instance, set_context
from monarch_slurm.actor.endpoint import EXPLICIT_PORT, PLAIN_METHOD, EndpointProperty
from monarch_slurm.actor.errors import ActorError, MeshFailure, RemoteExceptionError, format_exception
from monarch_slurm.actor.layout import ActorRef
from monarch_slurm.actor.port import Port
from monarch_slurm.actor.replies import EXCEPTION, VALUE
from monarch_slurm.actor.shape import Extent, Point, Shape, Slice
from monarch_slurm.config import settings
from monarch_slurm.wire import Address, Message, dumps, loads
from monarch_slurm.wire.pickling import Buffer

if TYPE_CHECKING:
    from monarch_slurm.actor.runtime import PortAddress, Runtime

logger = logging.getLogger(__name__)


class Call:
    """One message to an actor: which method, for which slice, and where the answer goes."""

    __slots__ = ("body", "method", "plain", "port", "src", "view")

    def __init__(self, message: Message) -> None:
        fields = message.fields
        self.method: str = fields["method"]
        port = fields["port"]
        self.port: PortAddress | None = tuple(port) if port else None
        self.view: tuple[list[str], int, list[int], list[int]] = fields["view"]
        self.plain: int = fields.get("plain", 0)
        self.src = message.src
        self.body = message.body

    def place(self, base_rank: int) -> Point:
        """Return the place of the actor in the slice that this was sent to."""
        labels, offset, sizes, strides = self.view
        rank = Slice(offset=offset, sizes=sizes, strides=strides).index(base_rank)
        return Point(rank, Extent(labels, sizes))


@dataclass(frozen=True)
class _Stop:
    reason: str


class _EndActor(Exception):  # noqa: N818 - a signal to the cell's own loop, never seen outside
    def __init__(self, event: str, traceback: str | None, cause: BaseException | None) -> None:
        super().__init__(event)
        self.event = event
        self.traceback = traceback
        self.cause = cause


class Cell:
    """One actor on a thread of its own; see `SyncCell` and `AsyncCell`.

    Args:
        ref: the actor mesh; ``base_rank`` is this actor's proc in it.
        owner: process of the instance that spawned the mesh.
        build: makes the actor object; what it raises fails the actor.
        ready: port that hears that ``__init__`` is through.
    """

    def __init__(
        self,
        runtime: Runtime,
        ref: ActorRef,
        base_rank: int,
        creator: CreatorInstance,
        build: Callable[[], Any],
        ready: PortAddress | None,
    ) -> None:
        self.runtime = runtime
        self.ref = ref
        self.base_rank = base_rank
        self.owner = creator.address
        self._build = build
        self._ready = ready
        self._rank = ref.rank_of(base_rank)
        point = ref.shape.point(base_rank)
        display = ref.describe(base_rank)
        self.instance = Instance(runtime, self, ref.name, ref.class_name, point, creator, display, ref, base_rank)
        self.callers: set[Address] = set()
        self.down_reason = ""
        self.ended = threading.Event()
        self.object: Any = None
        self._control: deque[Callable[[], Any]] = deque()
        self._thread = threading.Thread(target=self._main, name=f"actor-{ref.name}", daemon=True)

    # ---- for any thread

    def start(self) -> None:
        """Begin: ``__init__`` runs on the actor's own thread."""
        self._thread.start()

    def put(self, call: Call) -> bool:
        """Queue a message; False if the actor takes none any more."""
        if self.down_reason:
            return False
        if call.port is not None:
            self.callers.add(Address(*call.port[:2]))
        self._enqueue(call)
        return True

    def supervise(self, failure: MeshFailure) -> None:
        """Queue the failure of a mesh that this actor owns."""
        self._add_control(lambda: self._supervise(failure))

    def end(self, reason: str, failed: bool) -> None:
        """Stop after the queued messages, or fail before the next one."""
        if failed:
            event = f"actor {self.instance.display} failed: actor explicitly aborted due to: {reason}"
            self._add_control(lambda: self._abort(event))
        else:
            self._enqueue(_Stop(reason))

    # ---- for subclasses

    def _main(self) -> None:
        raise NotImplementedError

    def _enqueue(self, item: Call | _Stop | None) -> None:
        raise NotImplementedError

    def _add_control(self, control: Callable[[], Any]) -> None:
        self._control.append(control)
        self._enqueue(None)

    @staticmethod
    def _abort(event: str) -> None:
        raise _EndActor(event, None, None)

    # ---- on the actor's thread

    def _construct(self) -> None:
        set_context(Context(self.instance, self.instance.rank))
        try:
            self.object = self._build()
        except BaseException as error:
            raise self._failure(error, "actor explicitly aborted due to: ") from error
        if self._ready is not None:
            self.runtime.post(self._ready, self._rank, VALUE, dumps(True))

    def _prepare(self, call: Call) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return the method and its arguments, the response port among them where the endpoint asks for it."""
        args, kwargs = loads(call.body)
        attribute = getattr(type(self.object), call.method, None)
        explicit = bool(call.plain & EXPLICIT_PORT)
        if isinstance(attribute, EndpointProperty):
            method = attribute._method
            explicit = attribute._explicit_response_port
        elif attribute is not None and call.plain & PLAIN_METHOD:
            method = attribute
        else:
            raise AttributeError(f"{self.ref.class_name} has no endpoint {call.method!r}")
        if explicit:
            args = (Port._to(self.runtime, call.port, self._answer_rank(call)), *args)
        return method, (self.object, *args), kwargs

    def _answer_rank(self, call: Call) -> int:
        return call.place(self.base_rank).rank

    def _answer(self, call: Call, status: str, value: Any) -> None:
        if call.port is None:
            return
        try:
            frames = dumps(value)
        except Exception as error:  # a part of the result raises whatever it likes when pickled
            status, frames = EXCEPTION, self._pickle_error(call, error)
        self.runtime.post(call.port, self._answer_rank(call), status, frames)

    def _answer_error(self, call: Call, error: BaseException, note: str = "") -> None:
        if call.port is not None:
            frames = self._pickle_error(call, error, note)
            self.runtime.post(call.port, self._answer_rank(call), EXCEPTION, frames)

    def _pickle_error(self, call: Call, error: BaseException, note: str = "") -> list[Buffer]:
        message = f"Actor call {self.ref.name}.{call.method} failed{note}."
        formatted = format_exception(error)
        try:
            frames = dumps(ActorError(error, message, formatted))
            loads(frames)
        except Exception:  # the exception's own pickling or unpickling is at fault; its text still goes
            stand_in = RemoteExceptionError(f"{type(error).__module__}.{type(error).__qualname__}: {error}")
            frames = dumps(ActorError(stand_in, message, formatted))
        return frames

    def _failure(self, error: BaseException, note: str = "") -> _EndActor:
        if isinstance(error, _EndActor):
            return error
        text = format_exception(error)
        event = f"The actor {self.instance.display} and all its descendants have failed: {note}{text}"
        return _EndActor(event, text, error)

    def _judge(self, call: Call, error: BaseException) -> None:
        """Answer the caller, or raise what ends the actor."""
        explicit = self._is_explicit(call)
        if isinstance(error, Exception) and call.port is not None and not explicit:
            self._answer_error(call, error)
            return
        raise self._failure(error) from error

    def _is_explicit(self, call: Call) -> bool:
        attribute = getattr(type(self.object), call.method, None)
        return bool(call.plain & EXPLICIT_PORT) or getattr(attribute, "_explicit_response_port", False)

    def _supervise(self, failure: MeshFailure) -> Any:
        handler = getattr(self.object, "__supervise__", None)
        if handler is None or getattr(handler, "_monarch_doc_stub", False):
            return self._unhandled(failure)
        return handler(failure)

    def _unhandled(self, failure: MeshFailure) -> None:
        event = f"The actor {self.instance.display} and all its descendants have failed: {failure.event}"
        raise _EndActor(event, failure.traceback, None)

    def _supervise_failed(self, failure: BaseException) -> _EndActor:
        text = format_exception(failure)
        event = (
            f"The actor {self.instance.display} and all its descendants have failed: "
            f"ErrorDuringHandlingSupervision: {text}"
        )
        return _EndActor(event, text, failure)

    def _finish(self, event: str, traceback: str | None, failed: bool) -> None:
        """Tell everybody; the actor takes nothing any more."""
        self.down_reason = event
        self.runtime.release(self.instance, event)
        self.runtime.cell_down(self, event, traceback, failed)
        self.ended.set()

    def _stopped_event(self, reason: str) -> str:
        return f"actor {self.instance.display} has status: stopped: {reason}"

    def _cleanup_handler(self) -> Callable[..., Any] | None:
        handler = getattr(self.object, "__cleanup__", None)
        return None if getattr(handler, "_monarch_doc_stub", False) else handler


class SyncCell(Cell):
    """An actor whose endpoints are plain functions: a thread without an event loop."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._inbox: queue.SimpleQueue[Call | _Stop | None] = queue.SimpleQueue()

    def _enqueue(self, item: Call | _Stop | None) -> None:
        self._inbox.put(item)

    def _main(self) -> None:
        try:
            self._construct()
            reason = self._serve()
            self._cleanup(None)
        except _EndActor as end:
            try:
                self._cleanup(end.cause or RuntimeError(end.event))
            except _EndActor as again:
                logger.error("%s", again.event)
            self._finish(end.event, end.traceback, failed=True)
        else:
            self._finish(self._stopped_event(reason), None, failed=False)

    def _serve(self) -> str:
        while True:
            item = self._inbox.get()
            while self._control:
                self._run_control(self._control.popleft())
            if isinstance(item, _Stop):
                return item.reason
            if item is not None:
                self._handle(item)

    def _run_control(self, control: Callable[[], Any]) -> None:
        try:
            handled = control()
        except _EndActor:
            raise
        except BaseException as error:
            raise self._supervise_failed(error) from error
        if not handled:
            raise _EndActor(*self._not_handled())

    def _not_handled(self) -> tuple[str, None, None]:
        return f"The actor {self.instance.display} did not handle the failure of a mesh that it owns", None, None

    def _supervise(self, failure: MeshFailure) -> Any:
        return super()._supervise(failure) or self._unhandled(failure)

    def _handle(self, call: Call) -> None:
        set_context(Context(self.instance, call.place(self.base_rank)))
        try:
            method, args, kwargs = self._prepare(call)
            if inspect.iscoroutinefunction(method):
                raise TypeError(
                    f"{call.method} is async, and this actor has no event loop: its endpoints are not async"
                )
            result = method(*args, **kwargs)
        except BaseException as error:
            self._judge(call, error)
            return
        if not self._is_explicit(call):
            self._answer(call, VALUE, result)

    def _cleanup(self, error: BaseException | None) -> None:
        handler = self._cleanup_handler()
        if handler is None or self.object is None:
            return
        try:
            handler(error)
        except BaseException as raised:
            raise self._failure(raised, "__cleanup__ failed: ") from raised


class AsyncCell(Cell):
    """An actor whose endpoints are coroutines: a thread with an event loop of its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._inbox: deque[Call | _Stop | None] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived: asyncio.Event | None = None
        self._ready_lock = threading.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def _enqueue(self, item: Call | _Stop | None) -> None:
        self._inbox.append(item)
        with self._ready_lock:
            loop, arrived = self._loop, self._arrived
        if loop is not None and arrived is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the actor has ended
                loop.call_soon_threadsafe(arrived.set)

    def _main(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        with self._ready_lock:
            self._loop, self._arrived = asyncio.get_running_loop(), asyncio.Event()
        try:
            self._construct()
            reason = await self._serve()
            await self._end_tasks()
            await self._cleanup(None)
        except _EndActor as end:
            try:
                await self._end_tasks()
                await self._cleanup(end.cause or RuntimeError(end.event))
            except _EndActor as again:
                logger.error("%s", again.event)
            self._finish(end.event, end.traceback, failed=True)
        else:
            self._finish(self._stopped_event(reason), None, failed=False)

    async def _serve(self) -> str:
        assert self._arrived is not None
        while True:
            while self._control:
                await self._run_control(self._control.popleft())
            if not self._inbox:
                self._arrived.clear()
                if not self._inbox:
                    await self._arrived.wait()
                continue
            item = self._inbox.popleft()
            if isinstance(item, _Stop):
                return item.reason
            if item is not None:
                await self._handle(item)

    async def _run_control(self, control: Callable[[], Any]) -> None:
        try:
            await self._maybe_await(control())
        except _EndActor:
            raise
        except BaseException as error:
            raise self._supervise_failed(error) from error

    def _supervise(self, failure: MeshFailure) -> Any:
        async def decide() -> None:
            with _hidden_loop():
                answer = Cell._supervise(self, failure)
            if not await self._maybe_await(answer):
                self._unhandled(failure)

        return decide()

    @staticmethod
    async def _maybe_await(value: Any) -> Any:
        return await value if isinstance(value, Awaitable) else value

    async def _handle(self, call: Call) -> None:
        set_context(Context(self.instance, call.place(self.base_rank)))
        try:
            method, args, kwargs = self._prepare(call)
            if inspect.iscoroutinefunction(method):
                if self._is_concurrent(call):
                    self._start_task(call, method, args, kwargs)
                    return
                result = await method(*args, **kwargs)
            else:
                with _hidden_loop():
                    result = method(*args, **kwargs)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._judge(call, error)
            return
        if not self._is_explicit(call):
            self._answer(call, VALUE, result)

    def _is_concurrent(self, call: Call) -> bool:
        return getattr(getattr(type(self.object), call.method, None), "_concurrent", False)

    def _start_task(
        self, call: Call, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        async def body() -> None:
            try:
                result = await method(*args, **kwargs)
            except BaseException as error:
                if self._is_explicit(call):
                    if not (isinstance(error, asyncio.CancelledError) and self.down_reason):
                        end = self._failure(error)
                        self._add_control(lambda: self._raise(end))
                else:
                    self._answer_error(call, error, "" if isinstance(error, Exception) else " with BaseException")
                return
            if not self._is_explicit(call):
                self._answer(call, VALUE, result)

        task = asyncio.ensure_future(body())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    def _raise(end: _EndActor) -> None:
        raise end

    async def _end_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _cleanup(self, error: BaseException | None) -> None:
        handler = self._cleanup_handler()
        if handler is None or self.object is None:
            return
        try:
            await asyncio.wait_for(self._maybe_await(handler(error)), settings().cleanup_timeout)
        except BaseException as raised:
            raise self._failure(raised, "__cleanup__ failed: ") from raised


@contextlib.contextmanager
def _hidden_loop() -> Iterator[None]:
    """Let plain functions run as if no event loop did, so that a blocking ``get`` in them is not warned about."""
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)


def make_cell(runtime: Runtime, message: Message) -> Cell:
    """Return the cell that a spawn message asks for. What cannot be unpickled fails the actor, with the reason."""
    from monarch_slurm.actor.runtime import creator_of

    fields = message.fields
    ref = ref_from_fields(fields["ref"])
    home = runtime.home
    base_rank = home[2] if home is not None and home[0].mesh == ref.layout.mesh else ref.shape.ranks()[0]
    creator = creator_of(fields["creator"], message.src)
    ready = tuple(fields["ready"]) if fields["ready"] else None
    asynchronous = fields["asynchronous"]

    def build() -> Any:
        try:
            actor_class, args, kwargs = loads(message.body)
        except ImportError as error:
            error.add_note(
                f"host {runtime.host_name} cannot import what actor {ref.name!r} needs; install it there, or make the "
                "folder that holds it importable on every host"
            ) if hasattr(error, "add_note") else None
            raise
        return actor_class(*args, **kwargs)

    kind = AsyncCell if asynchronous else SyncCell
    return kind(runtime, ref, base_rank, creator, build, ready)


def ref_to_fields(ref: ActorRef) -> list[Any]:
    """Return ``ref`` as plain values, so that a spawn can be told without unpickling anything."""
    ndslice = ref.shape.ndslice
    layout = [ref.layout.mesh, list(ref.layout.hosts), ref.layout.per_host]
    shape = [ref.shape.labels, ndslice.offset, ndslice.sizes, ndslice.strides]
    return [ref.mesh, ref.name, layout, shape, ref.display, ref.class_name]


def ref_from_fields(fields: list[Any]) -> ActorRef:
    """Return what `ref_to_fields` was given."""
    from monarch_slurm.actor.layout import ProcLayout

    mesh, name, (proc_mesh, hosts, per_host), (labels, offset, sizes, strides), display, class_name = fields
    layout = ProcLayout(proc_mesh, tuple(hosts), per_host)
    return ActorRef(
        mesh, name, layout, Shape(labels, Slice(offset=offset, sizes=sizes, strides=strides)), display, class_name
    )
