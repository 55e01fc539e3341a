"""Futures: results that are on their way, for threads and for asyncio alike."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
import warnings
from collections.abc import Callable, Generator
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from monarch_slurm.actor import driving
from monarch_slurm.actor.attention import FIRST_LOOK_SECONDS, Attention, attention
from monarch_slurm.actor.signal_frames import is_of_signal_handler
from monarch_slurm.prompt import is_at_prompt

R = TypeVar("R")

_UNSET: Any = object()
_LONGEST = threading.TIMEOUT_MAX


class Lazy(Protocol):
    """What brings the result of a future only while somebody waits for it. For any thread."""

    def look(self, future: Future[Any], on_loop: bool) -> None:
        """Somebody begins to wait for ``future``, on the running event loop or by blocking."""

    def leave(self, future: Future[Any], got: bool, on_loop: bool) -> None:
        """Somebody waits no more: the result is there (``got``), or the wait ran out of time or was cancelled."""


class Future(Generic[R]):
    """The result of something that runs elsewhere. The work was started when the future was made; the future only
    waits.

    A future can be waited for many times, by several threads and event loops; it always gives the same value or raises
    the same exception. Dropping it does not stop the work. Two kinds begin when somebody first waits for them: those of
    `returns_future`, and those of `PortReceiver.recv`, which then take their turn at the port.
    """

    def __init__(self) -> None:
        raise TypeError(
            "a Future comes from an endpoint call or another method of this package; it cannot be constructed"
        )

    _lock: threading.Lock
    _decode_lock: threading.Lock
    _thunk: Callable[[], R] | None
    _error: BaseException | None
    _value: Any
    _done: bool
    _waiters: list[Callable[[], None]]
    _lazy: Lazy | None
    """Until somebody has the result."""
    _helper: Callable[[], None] | None
    """Brings the result nearer on the thread that waits; returns when there is nothing more for it to do."""
    _what: str | Callable[[], str]
    """What is waited for, for the text of a time-out."""
    _port: int | None
    """Number of the reply port that brings the result of a call."""
    _any_answer: bool
    """Any of the answers at that port may be the result; else all of them are needed."""

    @classmethod
    def _pending(cls) -> Future[R]:
        future: Future[R] = cls.__new__(cls)
        future._lock = threading.Lock()
        future._decode_lock = threading.Lock()
        future._thunk = None
        future._error = None
        future._value = _UNSET
        future._done = False
        future._waiters = []
        future._lazy = None
        future._helper = None
        future._what = ""
        future._port = None
        future._any_answer = False
        return future

    @classmethod
    def _of(cls, value: R) -> Future[R]:
        future = cls._pending()
        future._resolve(lambda: value)
        return future

    def _resolve(self, thunk: Callable[[], R]) -> None:
        """Set the result; ``thunk`` makes the value, once, on the thread that first looks at it."""
        self._finish(thunk, None)

    def _fail(self, error: BaseException) -> None:
        self._finish(None, error)

    def _fail_with(self, make: Callable[[], BaseException]) -> None:
        """Set the error; ``make`` makes it, once, on the thread that first looks at it."""

        def thunk() -> R:
            __tracebackhide__ = True
            raise make()

        self._finish(thunk, None)

    def _finish(self, thunk: Callable[[], R] | None, error: BaseException | None) -> None:
        with self._lock:
            if self._done:
                return
            self._thunk, self._error, self._done, self._helper = thunk, error, True, None
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter()

    def _on_done(self, waiter: Callable[[], None]) -> None:
        """Call ``waiter`` when there is a result: now if it is there, else on the thread that brings it."""
        with self._lock:
            if not self._done:
                self._waiters.append(waiter)
                return
        waiter()

    def _forget(self, waiter: Callable[[], None]) -> None:
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def _help_with(self, helper: Callable[[], None]) -> None:
        """Have threads that wait without a time-out call ``helper``; not the main one, where signal handlers raise."""
        with self._lock:
            if not self._done:
                self._helper = helper

    def _reopen(self) -> None:
        """Take back a result that nobody has looked at."""
        with self._lock:
            self._thunk, self._done = None, False

    def _outcome(self) -> R:
        __tracebackhide__ = True
        if self._value is _UNSET and self._error is None:
            with self._decode_lock:
                if self._value is _UNSET and self._error is None:
                    assert self._thunk is not None
                    try:
                        self._value = self._thunk()
                    except Exception as error:  # whatever the value's own unpickling raises is the result
                        if is_of_signal_handler(error):  # it interrupts whoever looks; the value is still to be made
                            raise
                        self._error = error
                    self._thunk = None
            self._lazy = None
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[no-any-return]

    def get(self, timeout: float | None = None) -> R:
        """Wait and return the value.

        Args:
            timeout: seconds; None waits for ever.

        Raises:
            TimeoutError: no result within ``timeout``; a later call may still get it, but for a future of
                `returns_future`, whose body has been cancelled.
            ActorDeadlockError: the actor that waits is the one that has to answer, or that one waits for it. This is
                noticed after a second, or with the time-out.
            ValueError: ``timeout`` is negative, infinite or not a number.
        """
        __tracebackhide__ = True  # notebooks leave out the frames of this module
        if timeout is not None and (math.isnan(timeout) or math.isinf(timeout) or timeout < 0):
            raise ValueError(f"invalid timeout {timeout}: seconds, 0 or more, expected")
        lazy = self._lazy
        if not self._done or lazy is not None:
            _warn_in_loop()
            if not (self._wait(timeout) if lazy is None else self._wait_lazily(lazy, timeout)):
                what = self._what if isinstance(self._what, str) else self._what()
                raise TimeoutError(
                    f"no result within {timeout:g} s{what and ' of '}{what}; it is not lost: a later get() may have it"
                )
        return self._outcome()

    def _wait_lazily(self, lazy: Lazy, timeout: float | None) -> bool:
        __tracebackhide__ = True
        got = False
        try:
            lazy.look(self, on_loop=False)  # a Ctrl-C in here comes when the body has begun
            got = self._done or self._wait(timeout)
        finally:
            lazy.leave(self, got, on_loop=False)
        return self._done  # it may have come at the last moment

    def _wait(self, timeout: float | None) -> bool:
        """Wait up to ``timeout`` seconds; return whether there is a result."""
        __tracebackhide__ = True
        end = None if timeout is None else time.monotonic() + timeout
        helper = self._helper
        if helper is not None and timeout is None and threading.current_thread() is not threading.main_thread():
            helper()
            if self._done:
                return True
        attentive = attention()
        if attentive is None:
            self._pause(lambda: self._done, end)
            return self._done
        return self._wait_attentively(attentive, end)

    def _wait_attentively(self, attentive: Attention, end: float | None) -> bool:
        __tracebackhide__ = True
        look_at, wait = time.monotonic() + FIRST_LOOK_SECONDS, None
        interrupted, attentive.blocking = attentive.blocking, (self, end)
        try:
            while True:
                attentive.attend()
                now = time.monotonic()
                is_over = end is not None and now >= end
                if not self._done and (is_over or now >= look_at):
                    wait = wait or attentive.watch(self, end)
                    if (deadlock := wait.look()) is not None:
                        raise deadlock
                    look_at = wait.due
                if self._done or is_over:
                    return self._done
                pause_end = look_at if end is None else min(look_at, end)
                self._pause(lambda: self._done or attentive.is_due(), pause_end, attentive)
        finally:
            attentive.blocking = interrupted
            if wait is not None:
                wait.close()

    def _pause(self, is_over: Callable[[], bool], end: float | None, attentive: Attention | None = None) -> None:
        """Wait until ``is_over()``, or until ``end``; whoever changes what it looks at calls the waker."""
        __tracebackhide__ = True
        try:
            self._wake_by(driving.wake, attentive)
            driving.drive(is_over, None if end is None else end - time.monotonic())
        finally:
            self._forget(driving.wake)
        if is_over():
            return
        arrived = threading.Lock()
        arrived.acquire()

        def arrive() -> None:
            with contextlib.suppress(RuntimeError):  # the future and what the actor attends to may both come
                arrived.release()

        try:
            self._wake_by(arrive, attentive)
            if not is_over():
                arrived.acquire(timeout=-1.0 if end is None else min(max(0.0, end - time.monotonic()), _LONGEST))
        finally:
            self._forget(arrive)
            if attentive is not None:
                attentive.waker = None

    def _wake_by(self, waker: Callable[[], None], attentive: Attention | None) -> None:
        if attentive is not None:
            attentive.waker = waker
        self._on_done(waker)

    result = get

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Wait and return the exception that `get` would raise, or None. A time-out is returned, too."""
        try:
            self.get(timeout)
        except Exception as error:  # to return it is what this method is for
            if error is not self._error and is_of_signal_handler(error):
                raise
            return error
        return None

    def as_asyncio(self) -> asyncio.Future[R]:
        """Return a future of the running event loop with the same result; cancelling it cancels nothing else.

        Raises:
            RuntimeError: no event loop runs.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError("as_asyncio() requires a running asyncio event loop.") from None
        lazy = self._lazy
        if lazy is not None:
            lazy.look(self, on_loop=True)
        local: asyncio.Future[R] = loop.create_future()

        def settle() -> None:
            __tracebackhide__ = True
            if local.done():
                return
            try:
                local.set_result(self._outcome())
            except StopIteration as error:
                local.set_exception(RuntimeError(f"the remote call raised StopIteration: {error}"))
            except Exception as error:  # handed on to whoever awaits
                local.set_exception(error)

        def tell_loop() -> None:
            if asyncio._get_running_loop() is loop:
                loop.call_soon(settle)
                return
            try:
                loop.call_soon_threadsafe(settle)
            except RuntimeError:
                return  # that loop is closed; nobody can wait in it any more

        self._on_done(tell_loop)
        attentive = attention() if not self._done else None
        awaits = attentive.awaits if attentive is not None else None
        if awaits is not None:
            awaits.begin(local, self)

        def left(local: asyncio.Future[R]) -> None:
            self._forget(tell_loop)
            if awaits is not None:
                awaits.end(local)
            if lazy is not None:
                lazy.leave(self, not local.cancelled(), on_loop=True)

        # Whoever holds the local future holds this one, too: a channel drops values for nobody only.
        local.add_done_callback(left)
        return local

    def __await__(self) -> Generator[Any, None, R]:
        __tracebackhide__ = True
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise ValueError("__await__ with no active event loop: use .get() here") from None
        if self._done and self._lazy is None:
            return self._outcome()
        return (yield from self.as_asyncio())

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Future belongs to the process that made it; send its value, or a Port, instead")

    def __repr__(self) -> str:
        state = "pending" if not self._done else "failed" if self._error else "done"
        return f"<Future {state}>"


def _warn_in_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    if threading.current_thread() is threading.main_thread() and is_at_prompt():
        return  # the loop of a notebook's kernel runs at all times, and does nothing else while a cell runs
    warnings.warn(
        "Future.get() was called from within an active event loop: it blocks every other task of the loop. "
        "Use `await` there.",
        UserWarning,
        stacklevel=3,
    )
