"""A running actor: its thread, its life. What `sync_cell` and `async_cell` have in common.

One message is handled at a time. Control items (failures of owned meshes, undeliverable messages) go before queued
messages. An `AsyncCell` handles them, one at a time, beside a message that awaits; a `SyncCell` between messages and
while a message blocks in `Future.get`. An abort ends what the actor does as soon as it awaits or blocks there. A
graceful stop goes through the queue, so what was sent before it is still handled, but within a time limit. From the
moment that a stop is asked for, failures are not supervised any more.

An actor ends in this order: what it owns is stopped and awaited, its ``__cleanup__`` runs, everybody who waits for it
is told. A stopped actor that does not end in time is interrupted, and given up a little later: what waits for it is
told, and its thread, which cannot be ended from outside, is left alone.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monarch_slurm.actor.attention import Attention
from monarch_slurm.actor.context import Context, CreatorInstance, Instance, set_context
from monarch_slurm.actor.debugger.hook import call_ended
from monarch_slurm.actor.endpoint import EndpointProperty
from monarch_slurm.actor.errors import ActorError, MeshFailure, format_exception
from monarch_slurm.actor.layout import ActorRef
from monarch_slurm.actor.messages import EXPLICIT_PORT, PLAIN_METHOD, Call
from monarch_slurm.actor.port import Port
from monarch_slurm.actor.replies import EXCEPTION, VALUE
from monarch_slurm.actor.telemetry import recording, traced
from monarch_slurm.actor.undeliverable import UndeliverableMessageEnvelope
from monarch_slurm.actor.waits import CallsInHand, Wait
from monarch_slurm.config import settings
from monarch_slurm.host.exits import FailureKind
from monarch_slurm.wire import Address, dumps, loads
from monarch_slurm.wire.arriving import LostPayloadError
from monarch_slurm.wire.limits import LimitError
from monarch_slurm.wire.pickle_fault import explain
from monarch_slurm.wire.task_limits import start_thread, start_timer

if TYPE_CHECKING:
    from monarch_slurm.actor.future import Future
    from monarch_slurm.actor.messages import PortAddress
    from monarch_slurm.actor.runtime import Runtime

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stop:
    """The item in a cell's queue that ends it.

    Attributes:
        timeout: seconds that the meshes which the actor owns may take to end.
    """

    reason: str
    timeout: float


class EndActor(BaseException):
    """Ends a cell as a failure. Only the cell's own code sees it."""

    def __init__(
        self, kind: FailureKind, event: str, traceback: str | None = None, cause: BaseException | None = None
    ) -> None:
        super().__init__(event)
        self.kind = kind
        self.event = event
        self.traceback = traceback
        self.cause = cause


class Cell:
    """One actor on a thread of its own; see `SyncCell` and `AsyncCell`.

    Args:
        ref: the actor mesh; ``base_rank`` is this actor's proc in it.
        creator: who spawned, and so owns it.
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
        point = ref.shape.point(base_rank)
        display = ref.describe(base_rank)
        self.instance = Instance(runtime, self, ref.name, ref.class_name, point, creator, display, ref, base_rank)
        self.ended = threading.Event()
        self.object: Any = None
        self._lock = threading.Lock()
        self._callers: set[tuple[str, str]] = set()
        self._down_reason = ""
        self.hears_undeliverable = False
        self.failed = False
        self._doing = "__init__"
        self._control: deque[Callable[[], Any]] = deque()
        self._end: EndActor | None = None
        """Ends the actor when its thread next looks."""
        self._stopping = False
        self._ending = False
        self._timers: list[threading.Timer] = []
        self.in_hand = CallsInHand(self._is_explicit)
        self._attention = Attention(self._attend, self._is_due, lambda future, end: Wait(self, future, end))
        self._thread = threading.Thread(target=self._run_thread, name=f"actor-{ref.name}", daemon=True)

    @property
    def kept(self) -> bool:
        """Whether a restart policy holds for its process."""
        return self.ref.layout.keeper is not None

    # ---- for any thread

    def start(self) -> None:
        """Begin: ``__init__`` runs on the actor's own thread. An actor that cannot have one fails."""
        try:
            start_thread(self._thread)
        except LimitError as error:
            event = f"The actor {self.instance.display} and all its descendants have failed: {error}"
            self._finish(event, None, FailureKind.ACTOR_ERROR)

    def put(self, call: Call) -> str:
        """Queue a message; return an empty text, or why the actor takes none any more."""
        with self._lock:
            # Whoever is among the callers before the actor ends is told of its end; later ones are told here.
            if self._down_reason:
                return self._down_reason
            if call.port is not None:
                self._callers.add(call.port[:2])
                self.in_hand.queued.add(call.port)
        self._enqueue(call)
        if call.receipt is not None:
            self.runtime.post(call.receipt, self._answer_rank(call), VALUE, [])
        return ""

    @property
    def doing(self) -> str:
        """Name of the endpoint or hook that runs; empty if none does."""
        return self._doing

    def describe(self) -> dict[str, Any]:
        """Return what this actor is and does, as `monarch_slurm.controller.census` tells it."""
        rank = self.ref.rank_of(self.base_rank)
        return {
            "name": self.ref.name,
            "class": self.ref.class_name,
            "rank": rank,
            "doing": self._doing,
            "waiting": self._backlog(),
        }

    def tell_wait(self, tell: Callable[[Future[Any] | None, float | None], None]) -> None:
        """Tell which future the actor waits for in the message that it handles, and until when (None: no limit)."""
        tell(*(self._attention.blocking or (None, None)))

    def supervise(self, failure: MeshFailure) -> None:
        """Queue the failure of a mesh that this actor owns."""
        self._add_control(lambda: None if self._stopping else self._supervise(failure))

    def undeliverable(self, message: UndeliverableMessageEnvelope) -> None:
        """Queue the news that a message of this actor has not come to its receiver."""
        self._add_control(lambda: None if self._stopping else self._undelivered(message))

    def stop(self, reason: str, timeout: float, asker: Address | None = None, watched: bool = False) -> str:
        """Stop after the queued messages; return an empty text, or why the actor has ended already.

        Args:
            timeout: seconds after which the actor is interrupted; what it owns gets half of them.
            asker: process that is told of the end, besides the owner and all callers.
            watched: this process is killed when the time is over, so nothing need be done here.
        """
        with self._lock:
            if self._down_reason:
                return self._down_reason
            if asker is not None:
                self._callers.add(asker)
            self._stopping = True
        self._enqueue(Stop(reason, timeout / 2))
        if not watched:
            self._start_timer(timeout, lambda: self._overdue(timeout))
        return ""

    def end(self, reason: str, failed: bool) -> None:
        """Stop after the queued messages, or fail as soon as the actor awaits or blocks in `Future.get`."""
        if failed:
            event = f"actor {self.instance.display} failed: actor explicitly aborted due to: {reason}"
            self._interrupt(EndActor(FailureKind.ACTOR_ABORTED, event))
        else:
            self.stop(reason, settings().stop_actor_timeout)

    # ---- for subclasses

    def _main(self) -> None:
        raise NotImplementedError

    def _enqueue(self, item: Call | Stop | None) -> None:
        """Put an item into the queue; None only wakes the actor, to look at its control items."""
        raise NotImplementedError

    def _backlog(self) -> int:
        """Return the number of queued items."""
        raise NotImplementedError

    def _supervise(self, failure: MeshFailure) -> Any:
        raise NotImplementedError

    def _undelivered(self, message: UndeliverableMessageEnvelope) -> Any:
        raise NotImplementedError

    def _add_control(self, control: Callable[[], Any]) -> None:
        self._control.append(control)
        self._wake()

    def _wake(self) -> None:
        """Have the actor look at its control items and at its end. For any thread."""
        raise NotImplementedError

    def _is_due(self) -> bool:
        """Return whether the actor's thread has anything to attend to while it blocks."""
        raise NotImplementedError

    def _attend(self) -> None:
        """Do what is due; raise what ends the actor. On the actor's thread."""
        raise NotImplementedError

    def _interrupt(self, end: EndActor) -> None:
        """End what the actor does, and the actor as a failure. For any thread."""
        with self._lock:
            if self._end is None:
                self._end = end
        self._wake()

    def _overdue(self, seconds: float) -> None:
        """The time that a stop may take is over: interrupt the actor, and give it up if it does not end even so."""
        event = (
            f"The actor {self.instance.display} and all its descendants have failed: it has not ended within "
            f"{seconds:g} s of its stop (setting stop_actor_timeout); it is in {self._doing or 'no endpoint'}"
        )
        event += self._where()
        self._start_timer(settings().cleanup_timeout, lambda: self._finish(event, None, FailureKind.STOP_TIMEOUT))
        self._interrupt(EndActor(FailureKind.STOP_TIMEOUT, event))

    def _where(self) -> str:
        """Return where the actor's thread is, as lines for a person."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return ""
        return "; its stack (innermost call last):\n" + "".join(traceback.format_stack(frame)[-_STACK_FRAMES:]).rstrip()

    def _start_timer(self, seconds: float, then: Callable[[], None]) -> threading.Timer:
        timer = threading.Timer(seconds, then)
        with self._lock:
            if not self._down_reason:
                self._timers.append(timer)
                start_timer(timer, f"the stop of {self.instance.display}")
        return timer

    # ---- on the actor's thread

    def _run_thread(self) -> None:
        self._attention.install()
        try:
            self._main()
        except BaseException as error:  # a fault of this package; even so, nobody may wait for this actor for ever
            end = self._failure(error, "the runtime failed: ")
            self._finish(end.event, end.traceback, end.kind)
            raise
        finally:
            self._attention.remove()

    def _construct(self) -> None:
        set_context(Context(self.instance, self.instance.rank))
        try:
            self.object = self._build()
        except BaseException as error:
            call_ended(error)
            raise self._failure(error, "actor explicitly aborted due to: ") from error
        call_ended()
        self._doing = ""
        hook = getattr(self.object, "_handle_undeliverable_message", None)
        self.hears_undeliverable = hook is not None and not getattr(hook, "_monarch_doc_stub", False)
        if self._ready is not None:
            self.runtime.post(self._ready, self.instance.rank.rank, VALUE, dumps(True))

    def _prepare(self, call: Call) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return the method and its arguments, the response port among them where the endpoint asks for it."""
        self._doing = call.method
        args, kwargs = loads(call.body)
        attribute = getattr(type(self.object), call.method, None)
        if isinstance(attribute, EndpointProperty):
            method = attribute._method
            if attribute._instrument and recording():
                method = traced(method, name=f"{self.ref.name}.{call.method}")
        elif attribute is not None and call.plain & PLAIN_METHOD:
            method = attribute
        else:
            raise AttributeError(f"{self.ref.class_name} has no endpoint {call.method!r}")
        if self._is_explicit(call):
            args = (Port._to(self.runtime, call.port, self._answer_rank(call)), *args)
        return method, (self.object, *args), kwargs

    def _is_explicit(self, call: Call) -> bool:
        attribute = getattr(type(self.object), call.method, None)
        return bool(call.plain & EXPLICIT_PORT) or getattr(attribute, "_explicit_response_port", False)

    def _answer_rank(self, call: Call) -> int:
        return call.place(self.base_rank).rank

    def _answer(self, call: Call, value: Any) -> None:
        call_ended()
        if call.port is None or self._is_explicit(call):
            return
        try:
            frames = dumps(value)
        except Exception as error:  # a part of the result raises whatever it likes when pickled
            explain(error, {"result": value}, f"what {self.ref.name}.{call.method}() returned")
            self._answer_error(call, error)
        else:
            self.runtime.post(call.port, self._answer_rank(call), VALUE, frames)

    def _answer_error(self, call: Call, error: BaseException, note: str = "") -> None:
        if call.port is not None:
            failure = ActorError(error, f"Actor call {self.ref.name}.{call.method} failed{note}.")
            self.runtime.post(call.port, self._answer_rank(call), EXCEPTION, dumps(failure))

    def _judge(self, call: Call, error: BaseException) -> None:
        """Answer the caller, or raise what ends the actor."""
        call_ended(error)
        if isinstance(error, LostPayloadError):
            return  # the call has not come; whoever made it knows that the connection ended
        if isinstance(error, Exception) and call.port is not None and not self._is_explicit(call):
            self._answer_error(call, error)
            return
        raise self._failure(error) from error

    def _failure(self, error: BaseException, note: str = "", kind: FailureKind = FailureKind.ACTOR_ERROR) -> EndActor:
        if isinstance(error, EndActor):
            return error
        text = format_exception(error)
        event = f"The actor {self.instance.display} and all its descendants have failed: {note}{text}"
        return EndActor(kind, event, text, error)

    def _ask_handler(self, failure: MeshFailure) -> Any:
        """Return what the actor's ``__supervise__`` returns, an answer or something to await; None if it has none."""
        handler = getattr(self.object, "__supervise__", None)
        if handler is None or getattr(handler, "_monarch_doc_stub", False):
            return None
        return handler(failure)

    def _unhandled(self, failure: MeshFailure) -> EndActor:
        event = f"The actor {self.instance.display} and all its descendants have failed: {failure.event}"
        return EndActor(FailureKind.CHILD_FAILED, event, failure.traceback)

    def _not_delivered(self, message: UndeliverableMessageEnvelope) -> EndActor:
        event = f"The actor {self.instance.display} and all its descendants have failed: {message}"
        return EndActor(FailureKind.MESSAGE_UNDELIVERED, event)

    def _handling_failed(self, error: BaseException, failure: MeshFailure) -> EndActor:
        if isinstance(error, EndActor):
            return error
        text = format_exception(error)
        event = (
            f"The actor {self.instance.display} and all its descendants have failed: "
            f"ErrorDuringHandlingSupervision: {text}\nwhile it handled: {failure.event}"
        )
        return EndActor(FailureKind.ACTOR_ERROR, event, text, error)

    # ---- the end

    def _begin_end(self) -> None:
        """The actor handles nothing more. What interrupts it from here on ends its ``__cleanup__``."""
        self._ending = True
        self._end = None
        self._control.clear()

    def _release(self, reason: str, timeout: float) -> None:
        """Stop what this actor owns, and wait until it has ended."""
        if not self.runtime.release(self.instance, reason, timeout).wait(timeout + _MARGIN_SECONDS):
            logger.warning("%s: what it owns has not ended within %g s", self.instance.display, timeout)

    def _cleanup_handler(self) -> Callable[..., Any] | None:
        """Return the actor's ``__cleanup__``, to be called once; None if there is none, or it has been called."""
        handler = getattr(self.object, "__cleanup__", None)
        if self._doing == "__cleanup__" or getattr(handler, "_monarch_doc_stub", False):
            return None
        self._doing = "__cleanup__"
        return handler

    def _watch_cleanup(self) -> threading.Timer:
        """Return a timer that gives this actor up when its cleanup hangs: its thread cannot be ended from outside."""
        seconds = settings().cleanup_timeout
        event = (
            f"The actor {self.instance.display} and all its descendants have failed: __cleanup__ has not ended within "
            f"{seconds:g} s (setting cleanup_timeout)"
        )
        return self._start_timer(seconds, lambda: self._finish(event, None, FailureKind.STOP_TIMEOUT))

    def _stopped_event(self, reason: str) -> str:
        return f"actor {self.instance.display} has status: stopped: {reason}"

    def _finish(self, event: str, traceback: str | None, kind: FailureKind | None) -> None:
        """Tell everybody; the actor takes nothing any more. The first call counts.

        Args:
            kind: what failed; None if the actor just stops.
        """
        with self._lock:
            if self._down_reason:
                return
            self._down_reason = event
            self.failed = kind is not None
            told = {self.owner, *(Address(*caller) for caller in self._callers)}
            timers, self._timers = self._timers, []
        for timer in timers:
            timer.cancel()
        self.runtime.release(self.instance, event, 0.0)  # what it has spawned in its cleanup
        self.runtime.cell_down(self, told, event, traceback, kind)
        self.ended.set()


_STACK_FRAMES = 5
"""Of an actor that does not end, so many are reported."""

_MARGIN_SECONDS = 1.0
"""After the time-out of owned meshes, for the news of their end to come."""
