"""Threads that wait for a message read it themselves: no other thread is woken for it.

A process has one link on which almost all comes. Its I/O loop reads it while every other thread is busy; a thread that
waits for a future, and an actor that has nothing to do, take its place until they have what they wait for.

On the main thread Python runs signal handlers between any two instructions, and what one raises (KeyboardInterrupt)
would tear a message in hand. So while the main thread reads, handlers are put off until it has left the link.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import asyncio
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from monarch_slurm.wire import Message, StreamLink

_link: StreamLink | None = None
_MAIN_THREAD = threading.main_thread().ident

_SIGNALS = [int(number) for number in signal.Signals if number not in (signal.SIGKILL, signal.SIGSTOP)]
# What `signal` wraps, without the enumerations that it makes of numbers: they take ten times as long.
_get_handler: Callable[[int], Any] = _signal.getsignal
_set_handler: Callable[[int, Any], Any] = _signal.signal


def set_link(link: StreamLink) -> None:
    """Say which link threads of this process read."""
    global _link
    _link = link


def _leave_to_parent() -> None:
    global _link
    _link = None  # what comes there is for the parent


os.register_at_fork(after_in_child=_leave_to_parent)


def wake() -> None:
    """Make a thread in `drive` ask again whether it is done. For any thread."""
    if _link is not None:
        _link.wake()


def drive(done: Callable[[], bool], timeout: float | None = None, idle: bool = False) -> None:
    """Read until ``done()`` or for ``timeout`` seconds (None: no limit); less if another thread reads.

    Whoever changes what ``done`` looks at calls `wake`.

    Args:
        idle: this thread waits for nothing in particular, and leaves the link to one that does.
    """
    __tracebackhide__ = True
    link = _link
    if link is None:
        return
    if threading.get_ident() != _MAIN_THREAD:
        link.drive(done, timeout, idle)
        return
    end = None if timeout is None else time.monotonic() + timeout
    while not done():
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            return
        shield = _Shield(link)
        try:
            driven = link.drive(lambda: bool(shield.pending) or done(), left, idle)  # noqa: B023 - called in this round
        finally:
            shield.lower()
        if not driven:
            return


def send_whole(send: Callable[[Message], None], message: Message) -> None:
    """Call ``send(message)``, which no signal handler may tear on the main thread."""
    if _link is None or threading.get_ident() != _MAIN_THREAD:
        send(message)
        return
    shield = _Shield(_link)
    try:
        send(message)
    finally:
        shield.lower()


class _Shield:
    """Puts off Python's signal handlers until it is lowered. On the main thread."""

    def __init__(self, link: StreamLink) -> None:
        self.pending: list[tuple[int, FrameType | None]] = []
        self._link = link
        self._up = True
        handlers = zip(_SIGNALS, map(_get_handler, _SIGNALS), strict=True)
        self._handlers: dict[int, Any] = {number: handler for number, handler in handlers if callable(handler)}
        try:
            for number in self._handlers:
                _set_handler(number, self._note)
        except BaseException:  # of a handler that was still in its place
            self.lower()
            raise

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._up:
            self.pending.append((number, frame))
            self._link.interrupt()
        else:
            self._handlers[number](number, frame)

    def lower(self) -> None:
        """Put the handlers back, and call those that were put off."""
        __tracebackhide__ = True
        self._up = False
        left = list(self._handlers.items())
        try:
            while left:
                _set_handler(*left[-1])
                left.pop()
        finally:
            for number, handler in left:  # one that is back in its place has raised
                _set_handler(number, handler)
        while self.pending:
            number, frame = self.pending.pop(0)
            self._handlers[number](number, frame)


def event_loop(is_idle: Callable[[], bool]) -> asyncio.AbstractEventLoop:
    """Return a new event loop that reads the link of this process while it has nothing else to do.

    Args:
        is_idle: returns whether it waits for nothing in particular.
    """
    return asyncio.SelectorEventLoop(_Selector(_link, is_idle) if _link is not None else None)


class _Selector(selectors.EpollSelector):
    """Waits for its own descriptors and, if no other thread does, for the link, which it then reads."""

    def __init__(self, link: StreamLink, is_idle: Callable[[], bool]) -> None:
        super().__init__()
        self._link = link
        self._is_idle = is_idle
        self._epoll: Any = self._selector  # type: ignore[attr-defined]
        self._epoll.register(link.fd, 0)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See `selectors.BaseSelector.select`."""
        if (timeout is not None and timeout <= 0) or not self._link.begin(self._is_idle()):
            return super().select(timeout)
        try:
            self._epoll.modify(self._link.fd, selectors.EVENT_READ)
            ready = super().select(timeout)
            self._epoll.modify(self._link.fd, 0)
            self._link.take()
        finally:
            self._link.end()
        return ready
