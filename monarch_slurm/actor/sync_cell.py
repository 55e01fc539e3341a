"""Actors whose endpoints are plain functions: a thread without an event loop."""

from __future__ import annotations

import inspect
import logging
import queue
from typing import Any

from monarch_slurm.actor import driving
from monarch_slurm.actor.cell import Cell, EndActor, Stop
from monarch_slurm.actor.context import Context, current_context, set_context
from monarch_slurm.actor.errors import MeshFailure
from monarch_slurm.actor.messages import Call
from monarch_slurm.actor.undeliverable import UndeliverableMessageEnvelope
from monarch_slurm.config import settings
from monarch_slurm.host.exits import FailureKind

logger = logging.getLogger(__name__)


class SyncCell(Cell):
    """One such actor."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._inbox: queue.SimpleQueue[Call | Stop | None] = queue.SimpleQueue()
        self._drives = False
        self._in_control = False

    def _enqueue(self, item: Call | Stop | None) -> None:
        self._inbox.put(item)
        if self._drives:
            driving.wake()

    def _wake(self) -> None:
        self._enqueue(None)
        self._attention.call()

    def _is_due(self) -> bool:
        return self._end is not None or (bool(self._control) and self._may_handle_control())

    def _may_handle_control(self) -> bool:
        return not self._in_control and not self._ending and self.object is not None

    def _attend(self) -> None:
        if self._end is None and self._control and self._may_handle_control():
            doing, interrupted = self._doing, current_context()
            self._in_control, self._doing = True, "__supervise__"
            set_context(Context(self.instance, self.instance.rank))
            try:
                while self._control:
                    self._control.popleft()()
            except EndActor as end:
                self._end = end  # ends the actor even if the endpoint that waits here swallows it
            finally:
                self._in_control, self._doing = False, doing
                set_context(interrupted)
        if self._end is not None:
            raise self._end

    def _backlog(self) -> int:
        return self._inbox.qsize()

    def _main(self) -> None:
        try:
            self._construct()
            stop = self._serve()
            self._begin_end()
            self._release(stop.reason, stop.timeout)
            self._cleanup(None)
        except EndActor as end:
            self._begin_end()
            self._release(end.event, settings().process_exit_timeout)
            try:
                self._cleanup(end.cause or RuntimeError(end.event))
            except EndActor as again:
                logger.error("%s", again.event)  # noqa: TRY400 - the event has the traceback already
            self._finish(end.event, end.traceback, end.kind)
        else:
            self._finish(self._stopped_event(stop.reason), None, None)

    def _serve(self) -> Stop:
        while True:
            item = self._next()
            self._attend()
            if isinstance(item, Stop):
                return item
            if item is not None:
                self.in_hand.begin(item)
                self._handle(item)
                item = self.in_hand.handled = None  # its large buffers are free for their sender
                self._doing = ""

    def _next(self) -> Call | Stop | None:
        """Return the next item; while there is none, this thread reads what comes to the process."""
        if self._inbox.empty():
            self._drives = True
            driving.drive(self._has_items, idle=True)
            self._drives = False
        return self._inbox.get()

    def _has_items(self) -> bool:
        return not self._inbox.empty()

    def _supervise(self, failure: MeshFailure) -> None:
        try:
            handled = self._ask_handler(failure)
        except BaseException as error:
            raise self._handling_failed(error, failure) from error
        if not handled and not failure.restarted:
            raise self._unhandled(failure)

    def _undelivered(self, message: UndeliverableMessageEnvelope) -> None:
        try:
            handled = self.object._handle_undeliverable_message(message)
        except BaseException as error:
            raise self._failure(error, f"{message}: ") from error
        if not handled:
            raise self._not_delivered(message)

    def _handle(self, call: Call) -> None:
        set_context(Context(self.instance, call.place(self.base_rank)))
        try:
            method, args, kwargs = self._prepare(call)
            if inspect.iscoroutinefunction(method):
                raise TypeError(  # noqa: TRY301 - judged like what the method itself raises
                    f"{call.method} is async, and this actor has no event loop: its endpoints are not async"
                )
            result = method(*args, **kwargs)
        except BaseException as error:
            self._judge(call, error)
        else:
            self._answer(call, result)

    def _cleanup(self, error: BaseException | None) -> None:
        handler = self._cleanup_handler()
        if handler is None or self.object is None:
            return
        watch = self._watch_cleanup()
        try:
            handler(error)
        except BaseException as raised:
            raise self._failure(raised, "__cleanup__ failed: ", FailureKind.CLEANUP_FAILED) from raised
        finally:
            watch.cancel()
