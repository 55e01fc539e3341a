"""Turning a coroutine function into one that returns a `Future`."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from monarch_slurm.actor.future import Future
from monarch_slurm.config import settings
from monarch_slurm.wire.task_limits import start_thread

R = TypeVar("R")


def returns_future(function: Callable[..., Coroutine[Any, Any, R]]) -> Callable[..., Future[R]]:
    """Make an ``async def`` function return a `Future`. Its body runs once, when the future is first looked at.

    ``await`` runs it on the event loop of whoever awaits, ``get`` on one of its own in a thread of its own. A future
    that nobody looks at never runs. The body sees the context of the call. A cancelled ``await`` ends the waiting, not
    the body. A ``get`` that runs out of time or is interrupted cancels the body, unless somebody else waits for it, and
    returns when the body's clean-up has run (or after ``cleanup_timeout`` seconds); from then on the future raises
    TimeoutError.

    Raises:
        TypeError: ``function`` is not async.
    """
    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"returns_future is for async functions; {function!r} is none")

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Future[R]:
        inspect.signature(function).bind(*args, **kwargs)
        future: Future[R] = Future._pending()
        future._what = f"{function.__qualname__}()"
        future._lazy = _Body(functools.partial(function, *args, **kwargs), future._what)
        return future

    return wrapper


class _Body:
    """The body of one future; see `monarch_slurm.actor.future.Lazy`."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, Any]], name: str) -> None:
        self._make = make
        self._name = name
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()
        self._observers = 0
        self._begun = False
        self._given_up = False
        self._ended = threading.Event()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def look(self, future: Future[Any], on_loop: bool) -> None:
        """Begin, with the first look."""
        with self._lock:
            self._observers += 1
            begun, self._begun = self._begun, True
        if begun:
            return
        if on_loop:
            task = self._context.run(asyncio.ensure_future, self._run(future))
            _running.add(task)
            task.add_done_callback(_running.discard)
        else:
            start_thread(threading.Thread(target=self._run_aside, args=[future], name="monarch-future", daemon=True))

    def leave(self, future: Future[Any], got: bool, on_loop: bool) -> None:
        """Cancel the body if nobody else waits, and wait for its end."""
        with self._lock:
            self._observers -= 1
            if got or on_loop or self._observers or self._ended.is_set():
                return
            self._given_up = True
            loop = self._loop
            if loop is not None and self._task is not None:
                loop.call_soon_threadsafe(self._task.cancel)
        if asyncio._get_running_loop() is not loop or loop is None:
            self._ended.wait(settings().cleanup_timeout)
        future._fail(self._gave_up())

    def _run_aside(self, future: Future[Any]) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # the future has it
            self._context.run(asyncio.run, self._run(future))

    async def _run(self, future: Future[Any]) -> None:
        with self._lock:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            if self._given_up:
                self._ended.set()
                return
        try:
            value = await self._make()
        except asyncio.CancelledError:
            if self._given_up:
                future._fail(self._gave_up())
            else:
                future._fail(RuntimeError("the event loop that the body of this future ran on has ended"))
            raise
        except Exception as error:  # whatever the function raises is the result
            future._fail(error)
        else:
            future._resolve(lambda: value)
        finally:
            with self._lock:  # the loop takes no calls any more when this has returned
                self._ended.set()

    def _gave_up(self) -> TimeoutError:
        return TimeoutError(f"{self._name} was cancelled: a get() of it ran out of time or was interrupted")


_running: set[asyncio.Future[None]] = set()
"""Tasks are held by their loop only weakly."""
