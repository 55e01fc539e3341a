"""Actors whose endpoints are coroutines: a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from monarch_slurm.actor import driving
from monarch_slurm.actor.cell import Cell, EndActor, Stop
from monarch_slurm.actor.context import Context, set_context
from monarch_slurm.actor.debugger.hook import call_ended
from monarch_slurm.actor.errors import MeshFailure
from monarch_slurm.actor.future import Future
from monarch_slurm.actor.messages import Call
from monarch_slurm.actor.undeliverable import UndeliverableMessageEnvelope
from monarch_slurm.actor.waits import Awaits
from monarch_slurm.config import settings
from monarch_slurm.host.exits import FailureKind

logger = logging.getLogger(__name__)

_MESSAGES_IN_A_ROW = 64
"""After so many messages without a pause the actor's other tasks get their turn."""


class AsyncCell(Cell):
    """One such actor."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._inbox: deque[Call | Stop | None] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived = asyncio.Event()
        self._loop_lock = threading.Lock()
        self._handling = True
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving: asyncio.Task[Any] | None = None
        """Handles messages; None before and after that."""
        self._controlling: asyncio.Task[None] | None = None
        """Handles control items beside it."""
        self._in_control = False
        self._awaits = Awaits(self, lambda: self._serving)
        self._attention.awaits = self._awaits

    def tell_wait(self, tell: Callable[[Future[Any] | None, float | None], None]) -> None:
        """See `Cell.tell_wait`."""
        if self._attention.blocking is not None:  # the loop makes no calls
            super().tell_wait(tell)
        else:
            self._call_soon(lambda: tell(self._awaits.only(), None))

    def _enqueue(self, item: Call | Stop | None) -> None:
        self._inbox.append(item)
        self._call_soon(self._arrived.set)

    def _call_soon(self, callback: Callable[[], None]) -> None:
        with self._loop_lock:
            if self._loop is None:
                return
            if asyncio._get_running_loop() is self._loop:
                self._loop.call_soon(callback)
            else:
                self._loop.call_soon_threadsafe(callback)

    def _wake(self) -> None:
        self._call_soon(self._look)
        self._attention.call()

    def _is_due(self) -> bool:
        return self._end is not None

    def _attend(self) -> None:
        if self._end is not None:
            raise self._end

    def _backlog(self) -> int:
        return len(self._inbox)

    def _main(self) -> None:
        if sys.version_info >= (3, 11):
            with asyncio.Runner(loop_factory=lambda: driving.event_loop(self._is_idle)) as runner:
                runner.run(self._run())
        else:
            asyncio.run(self._run())

    def _is_idle(self) -> bool:
        """Return whether this actor waits for nothing but messages."""
        return not self._handling and not self._tasks and not self._in_control

    async def _run(self) -> None:
        with self._loop_lock:
            self._loop = asyncio.get_running_loop()
        try:
            await self._live()
        finally:
            with self._loop_lock:
                self._loop = None  # it is about to close, and takes no calls any more

    async def _live(self) -> None:
        try:
            self._construct()
            stop = await self._serve_until_end()
            await self._end_tasks()
            await self._release_aside(stop.reason, stop.timeout)
            await self._cleanup(None)
        except EndActor as end:
            await self._end_tasks()
            await self._release_aside(end.event, settings().process_exit_timeout)
            try:
                await self._cleanup(end.cause or RuntimeError(end.event))
            except EndActor as again:
                logger.error("%s", again.event)  # noqa: TRY400 - the event has the traceback already
            self._finish(end.event, end.traceback, end.kind)
        else:
            self._finish(self._stopped_event(stop.reason), None, None)

    async def _serve_until_end(self) -> Stop:
        self._serving = task = asyncio.current_task()
        try:
            self._look()
            return await self._serve()
        except asyncio.CancelledError as error:
            if self._end is None:
                raise self._failure(error) from error
            raise self._end from None
        finally:
            self._serving = None
            if sys.version_info >= (3, 11) and task is not None:
                while task.cancelling():  # what follows runs in this task, too
                    task.uncancel()

    def _look(self) -> None:
        """Begin with control items, if they are not being handled, and end what awaits if the actor is to end."""
        if self._serving is None:
            return
        if self._end is not None:
            self._serving.cancel()
        elif self._control and (self._controlling is None or self._controlling.done()):
            self._controlling = asyncio.get_running_loop().create_task(self._handle_control(), name="__supervise__")

    async def _handle_control(self) -> None:
        set_context(Context(self.instance, self.instance.rank))
        self._in_control = True
        try:
            while self._control and self._end is None:
                result = self._control.popleft()()
                if isinstance(result, Awaitable):
                    await result
        except EndActor as end:
            if not self._ending:
                self._interrupt(end)
        finally:
            self._in_control = False

    async def _serve(self) -> Stop:
        in_a_row = 0
        while True:
            while self._control and not self._in_control and self._end is None:
                self._look()  # control items begin before the next message does
                await asyncio.sleep(0)
            self._attend()
            if not self._inbox:
                # The event is cleared before the queue is looked at again: an item that comes between is not missed.
                self._arrived.clear()
                in_a_row = 0
                self._handling = False
                if not self._inbox:
                    await self._arrived.wait()
                continue
            item = self._inbox.popleft()
            if isinstance(item, Stop):
                return item
            if item is not None:
                self._handling = True
                self.in_hand.begin(item)
                await self._handle(item)
                item = self.in_hand.handled = None  # its large buffers are free for their sender
                self._handling = False
                self._doing = ", ".join(sorted({task.get_name() for task in self._tasks}))
                in_a_row += 1
                if in_a_row >= _MESSAGES_IN_A_ROW:
                    in_a_row = 0
                    await asyncio.sleep(0)

    async def _supervise(self, failure: MeshFailure) -> None:
        try:
            with _hidden_loop():
                handled = self._ask_handler(failure)
            if isinstance(handled, Awaitable):
                handled = await handled
        except BaseException as error:
            if self._ending and isinstance(error, asyncio.CancelledError):
                raise
            raise self._handling_failed(error, failure) from error
        if not handled and not failure.restarted:
            raise self._unhandled(failure)

    async def _undelivered(self, message: UndeliverableMessageEnvelope) -> None:
        try:
            with _hidden_loop():
                handled = self.object._handle_undeliverable_message(message)
            if isinstance(handled, Awaitable):
                handled = await handled
        except BaseException as error:
            if self._ending and isinstance(error, asyncio.CancelledError):
                raise
            raise self._failure(error, f"{message}: ") from error
        if not handled:
            raise self._not_delivered(message)

    async def _handle(self, call: Call) -> None:
        set_context(Context(self.instance, call.place(self.base_rank)))
        try:
            method, args, kwargs = self._prepare(call)
            if not inspect.iscoroutinefunction(method):
                with _hidden_loop():
                    result = method(*args, **kwargs)
            elif self._is_concurrent(call):
                self._start_task(call, method, args, kwargs)
                return
            else:
                result = await method(*args, **kwargs)
        except BaseException as error:
            if self._end is not None and isinstance(error, asyncio.CancelledError):
                raise
            self._judge(call, error)
        else:
            self._answer(call, result)

    def _is_concurrent(self, call: Call) -> bool:
        return getattr(getattr(type(self.object), call.method, None), "_concurrent", False)

    def _start_task(
        self, call: Call, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        async def body() -> None:
            try:
                result = await method(*args, **kwargs)
            except BaseException as error:
                self._task_failed(call, error)
            else:
                self._answer(call, result)

        task = asyncio.create_task(body(), name=call.method)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _task_failed(self, call: Call, error: BaseException) -> None:
        call_ended(error)
        explicit = self._is_explicit(call)
        if isinstance(error, EndActor):
            return  # which is under way
        if call.port is not None and not explicit:
            self._answer_error(call, error, "" if isinstance(error, Exception) else " with BaseException")
        elif not isinstance(error, asyncio.CancelledError):  # which is how the actor's end ends its tasks
            self._interrupt(self._failure(error))

    async def _end_tasks(self) -> None:
        """End what runs beside, concurrent endpoints and ``__supervise__``; what does not end in time is left."""
        self._begin_end()
        tasks = [*self._tasks, *([self._controlling] if self._controlling is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=settings().cleanup_timeout)
            if left:
                names = ", ".join(sorted(task.get_name() for task in left))
                logger.warning("%s: %s did not end when cancelled, and is left alone", self.instance.display, names)

    async def _release_aside(self, reason: str, timeout: float) -> None:
        if self.runtime.owns_anything(self.instance):
            await asyncio.to_thread(self._release, reason, timeout)

    async def _cleanup(self, error: BaseException | None) -> None:
        handler = self._cleanup_handler()
        if handler is None or self.object is None:
            return
        watch = self._watch_cleanup()
        try:
            result = handler(error)
            if isinstance(result, Awaitable):
                await result
        except BaseException as raised:
            raise self._failure(raised, "__cleanup__ failed: ", FailureKind.CLEANUP_FAILED) from raised
        finally:
            watch.cancel()


@contextlib.contextmanager
def _hidden_loop() -> Iterator[None]:
    """Let plain functions run as if no event loop did, so that a blocking ``get`` in them is not warned about."""
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
