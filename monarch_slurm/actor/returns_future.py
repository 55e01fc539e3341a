"""Turning a coroutine function into one that returns a `Future`."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from monarch_slurm.actor.future import Future

R = TypeVar("R")


def returns_future(function: Callable[..., Coroutine[Any, Any, R]]) -> Callable[..., Future[R]]:
    """Make an ``async def`` function return a `Future`. Its body runs once, when the future is first looked at.

    ``await`` runs it on the event loop of whoever awaits, ``get`` on one of its own in a thread of its own. A future
    that nobody looks at never runs. The body sees the context of the call. A time-out or a cancelled ``await`` ends the
    waiting, not the body.

    Raises:
        TypeError: ``function`` is not async.
    """
    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"returns_future is for async functions; {function!r} is none")

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Future[R]:
        inspect.signature(function).bind(*args, **kwargs)
        context = contextvars.copy_context()
        future: Future[R] = Future._pending()
        future._begin = lambda on_loop: _begin(future, function(*args, **kwargs), context, on_loop)
        return future

    return wrapper


def _begin(future: Future[Any], made: Coroutine[Any, Any, Any], context: contextvars.Context, on_loop: bool) -> None:
    async def body() -> None:
        try:
            value = await made
        except asyncio.CancelledError:  # the loop that it runs on ends
            future._fail(RuntimeError("the event loop that the body of this future ran on has ended"))
            raise
        except Exception as error:  # whatever the function raises is the result
            future._fail(error)
        else:
            future._resolve(lambda: value)

    if on_loop:
        task = context.run(asyncio.ensure_future, body())
        _running.add(task)
        task.add_done_callback(_running.discard)
    else:
        run = lambda: context.run(asyncio.run, body())  # noqa: E731
        threading.Thread(target=run, name="monarch-future", daemon=True).start()


_running: set[asyncio.Future[None]] = set()
"""Tasks are held by their loop only weakly."""
