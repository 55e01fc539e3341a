"""Ports and channels: a place to send values to, and the end where they come out."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from monarch_slurm.actor.context import context, current_instance, is_own, publish
from monarch_slurm.actor.future import Future
from monarch_slurm.actor.guests import dumps_for, receiving_runtime, runtime_of
from monarch_slurm.actor.messages import PortAddress
from monarch_slurm.actor.replies import EXCEPTION, VALUE
from monarch_slurm.actor.undeliverable import UndeliverableMessageEnvelope
from monarch_slurm.wire import CONTROLLER, Address, loads
from monarch_slurm.wire.arriving import when_whole
from monarch_slurm.wire.pickle_fault import explain

if TYPE_CHECKING:
    from monarch_slurm.actor.runtime import Runtime

R = TypeVar("R")


class Port(Generic[R]):
    """Where values are sent to. It can be pickled and used in any process of the job. A sender's values keep order."""

    def __init__(self) -> None:
        raise TypeError("a Port comes from Channel.open() or an endpoint with an explicit response port")

    _runtime: Runtime
    """Of this process; it is in the other program if the port belongs to one."""
    _program: str
    _port: PortAddress | None
    _rank: int
    _once: bool
    _used: bool
    return_undeliverable: bool = True
    """Whether the sending actor's ``_handle_undeliverable_message``, if it has one, hears of what is sent to a port
    whose process has ended. It is dropped otherwise. The property does not travel with the port."""

    @classmethod
    def _to(
        cls, runtime: Runtime, port: PortAddress | None, rank: int, once: bool = False, program: str = ""
    ) -> Port[Any]:
        made: Port[Any] = cls.__new__(cls)
        made._runtime, made._port, made._rank, made._once, made._used = runtime, port, rank, once, False
        made._program = program
        return made

    def send(self, obj: R) -> None:
        """Send ``obj``; returns at once.

        Raises:
            TypeError: it does not pickle.
            RuntimeError: the port takes one value only and has been used.
        """
        self._post(VALUE, obj)

    def exception(self, e: Exception) -> None:
        """Send an exception; the receiver's ``recv`` raises it."""
        self._post(EXCEPTION, e)

    def _post(self, status: str, value: Any) -> None:
        if self._once and self._used:
            raise RuntimeError("OncePortRef already used")
        runtime = self._runtime if is_own(self._program) else runtime_of(self._program)
        try:
            frames = dumps_for(runtime, value)
        except Exception as error:
            explain(error, {"value": value}, "sent to a port")
            raise
        self._used = True
        if self._port is not None:
            runtime.post(self._port, self._rank, status, frames, **self._receipt(runtime, self._port))

    def _receipt(self, runtime: Runtime, port: PortAddress) -> dict[str, PortAddress]:
        """Have the sender told if what it sends does not come to the port's process; return what asks for that."""
        sender, process = current_instance(), Address(*port[:2])
        if sender is None or not sender.body.hears_undeliverable or not self.return_undeliverable:
            return {}
        if process in (CONTROLLER, runtime.address):  # they do not end before the sender does
            return {}

        def lost(rank: int, reason: str) -> None:
            dest = f"port {port[2]} of proc {process.proc}"
            sender.body.undeliverable(UndeliverableMessageEnvelope(sender.display, dest, reason))

        number = runtime.replies.expect({0: (process, None)}, lambda *_: None, lost)
        reason = runtime.why_down(process, None)
        if reason is not None:
            runtime.replies.lose([process], lambda *_: reason)
        return {"receipt": (*runtime.address, number)}

    def _seen_from(self, runtime: Runtime) -> PortAddress | None:
        """Return where processes of the program that ``runtime`` is in send to this port.

        Raises:
            RuntimeError: it is a port of neither that program nor this process.
        """
        port = self._port
        if port is None or (is_own(self._program) and runtime.guest_of == "") or runtime.guest_of == self._program:
            return port
        if is_own(self._program) and Address(*port[:2]) == self._runtime.address:
            return (*runtime.address, port[2])  # a guest hands on what is for ports of its process
        raise RuntimeError("answers of actors of another program can go to ports of that program and of this process")

    def __reduce__(self) -> tuple[Any, ...]:
        runtime = receiving_runtime()
        here = self._port is None or Address(*self._port[:2]) == self._runtime.address
        if runtime is not None and is_own(self._program) and here:
            return _rebind, (self._seen_from(runtime), self._rank, self._once, runtime.guest_of)
        return _rebind, (self._port, self._rank, self._once, publish(self._program))

    def __repr__(self) -> str:
        return f"<Port {self._port}>"


def _rebind(port: PortAddress | None, rank: int, once: bool, program: str = "") -> Port[Any]:
    return Port._to(context().actor_instance.runtime, port, rank, once, program)


class PortReceiver(Generic[R]):
    """Where the values of a channel come out, in the order of arrival.

    A value belongs to the future that was waited for first (`Future.get`, ``await``), while it is waited for. A future
    that nobody has waited for takes none; one whose wait runs out of time or is cancelled leaves its turn to others.

    When neither the receiver nor a future of it is referred to any more, what is sent to its port is dropped.
    """

    def __init__(self, runtime: Runtime, ranked: bool = False) -> None:
        self._lock = threading.Lock()
        self._values: deque[_Arrived] = deque()
        self._count = 0
        # Weak: a future that is waited for on an event loop that has ended must not swallow a value.
        self._waiting: deque[weakref.ref[_Received]] = deque()
        self._ranked = ranked
        self._runtime = runtime
        take = weakref.WeakMethod(self._take)
        self._number = runtime.replies.open_channel(lambda *arrived: _hand_on(take, arrived))
        weakref.finalize(self, runtime.replies.close, self._number).atexit = False

    def recv(self) -> Future[R]:
        """Return a future of the next value that nobody has, when it is first waited for."""
        future = _Received._pending()
        assert isinstance(future, _Received)
        future._what = "recv(): nothing was sent to the port"
        future._lazy = self
        return future

    def look(self, future: Future[Any], on_loop: bool) -> None:
        """Give ``future`` its value, or its turn. See `monarch_slurm.actor.future.Lazy`."""
        assert isinstance(future, _Received)
        with self._lock:
            future.observers += 1
            if future.observers > 1 or future._done:
                return
            if self._values:
                self._settle(future, self._values.popleft())
            else:
                self._waiting.append(weakref.ref(future))

    def leave(self, future: Future[Any], got: bool, on_loop: bool) -> None:
        """Pass on the turn of ``future``, or the value that it has in vain."""
        assert isinstance(future, _Received)
        with self._lock:
            future.observers -= 1
            if got or future.observers:
                return
            if not future._done:
                self._waiting = deque(other for other in self._waiting if other() not in (future, None))
            elif future._lazy is not None and future.arrived is not None:
                arrived, future.arrived = future.arrived, None
                future._reopen()
                self._pass_on(arrived)

    def ranked(self) -> PortReceiver[tuple[int, R]]:
        """Make `recv` give ``(rank, value)`` from here on; return this receiver."""
        self._ranked = True
        return self  # type: ignore[return-value]

    def close(self) -> None:
        """Take no more values."""
        self._runtime.replies.close(self._number)

    def _take(self, rank: int, status: str, frames: Any) -> None:
        with self._lock:
            self._count += 1
            self._pass_on((self._count, rank, status, frames))

    def _pass_on(self, arrived: _Arrived) -> None:
        future = None
        while future is None and self._waiting:
            future = self._waiting.popleft()()
        if future is not None:
            self._settle(future, arrived)
        elif self._values and arrived < self._values[0]:  # one that comes back
            self._values.appendleft(arrived)
        else:
            self._values.append(arrived)

    def _settle(self, future: _Received, arrived: _Arrived) -> None:
        _, rank, status, frames = future.arrived = arrived

        def value() -> Any:
            future.arrived = None
            received = loads(frames)
            if status == EXCEPTION:
                raise received
            if self._ranked:
                if rank < 0:
                    raise ValueError("this message has no rank")
                return rank, received
            return received

        when_whole(frames, lambda: future._resolve(value))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a PortReceiver belongs to the process that opened it; send its Port instead")


_Arrived = tuple[int, int, str, Any]
"""A value: how many came before it and itself, the sender's rank, `VALUE` or `EXCEPTION`, and its frames."""


class _Received(Future[Any]):
    """A future of a receiver; ``observers`` wait for it. The receiver's lock is for these."""

    observers = 0
    arrived: _Arrived | None = None


def _hand_on(take: Callable[[], Callable[[int, str, Any], None] | None], arrived: tuple[int, str, Any]) -> None:
    there = take()
    if there is not None:  # else nobody can get it any more
        there(*arrived)


class Channel(Generic[R]):
    """Makes connected pairs of `Port` and `PortReceiver`."""

    @staticmethod
    def open(once: bool = False) -> tuple[Port[Any], PortReceiver[Any]]:
        """Return a port and the receiver of what is sent to it.

        Args:
            once: the port takes a single value.
        """
        return _open(once, ranked=False)

    @staticmethod
    def open_ranked(once: bool = False) -> tuple[Port[Any], PortReceiver[Any]]:
        """Like `open`; the receiver gives ``(rank, value)``."""
        return _open(once, ranked=True)


def _open(once: bool, ranked: bool) -> tuple[Port[Any], PortReceiver[Any]]:
    runtime = context().actor_instance.runtime
    receiver: PortReceiver[Any] = PortReceiver(runtime, ranked)
    port = Port._to(runtime, (*runtime.address, receiver._number), -1, once)
    return port, receiver
