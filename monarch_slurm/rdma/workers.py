"""Threads for transfers: as many as run at a time, kept for a while, never waited for at the end of the program."""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from monarch_slurm.wire.task_limits import start_thread

_IDLE_SECONDS = 10.0
_AT_A_TIME = 16
"""Threads that wait for one owner."""


class Workers:
    """Runs functions on daemon threads. A function must not raise."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def run(self, function: Callable[[], None]) -> None:
        """Run ``function`` on a thread, at once."""
        with self._lock:
            start = self._idle == 0
            if not start:
                self._idle -= 1  # one that idles is promised to this function
        if start:
            start_thread(threading.Thread(target=self._main, args=(function,), name="rdma-work", daemon=True))
        else:
            self._work.put(function)

    def _main(self, function: Callable[[], None]) -> None:
        while True:
            function()
            with self._lock:
                self._idle += 1
            try:
                function = self._work.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._idle > 0:
                        self._idle -= 1
                        return
                function = self._work.get()  # this thread was promised


class _Waiting:
    """A function that waits for its turn."""

    def __init__(self, function: Callable[[], None], too_late: Callable[[], None]) -> None:
        self.function = function
        self.too_late = too_late
        self.over = False
        """It has had its turn, or was told that it is too late."""

    def end(self) -> Callable[[], None]:
        """Note that it is over; return the function, and keep nothing that it refers to."""
        function, self.over = self.function, True
        self.function = self.too_late = _nothing
        return function


def _nothing() -> None:
    pass


class Turns:
    """Runs functions that wait for one owner: a few at a time, each on a thread; the others wait without one."""

    def __init__(self, workers: Workers, at_a_time: int = _AT_A_TIME) -> None:
        self._workers = workers
        self._free = at_a_time
        self._changed = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._due: list[tuple[float, int, _Waiting]] = []
        """Those that wait, and some that did, as a heap by deadline."""
        self._numbers = itertools.count()
        self._is_watched = False

    def run(self, function: Callable[[], None], too_late: Callable[[], None], deadline: float) -> None:
        """Run ``function`` when it is its turn, or ``too_late`` at ``deadline`` (on the monotonic clock).

        Neither must raise.
        """
        with self._changed:
            starts = self._free > 0
            watch = False
            if starts:
                self._free -= 1
            else:
                waiting = _Waiting(function, too_late)
                self._waiting.append(waiting)
                heapq.heappush(self._due, (deadline, next(self._numbers), waiting))
                watch, self._is_watched = not self._is_watched, True
                if self._due[0][2] is waiting:
                    self._changed.notify_all()
        if starts:
            self._workers.run(lambda: self._take_turns(function))
        elif watch:
            self._workers.run(self._watch)

    def _take_turns(self, function: Callable[[], None]) -> None:
        while True:
            function()
            with self._changed:
                while self._waiting and self._waiting[0].over:
                    self._waiting.popleft()
                if not self._waiting:
                    self._free += 1
                    self._changed.notify_all()
                    return
                function = self._waiting.popleft().end()

    def _watch(self) -> None:
        """Tell those whose deadline comes before their turn."""
        while True:
            with self._changed:
                while self._due and self._due[0][2].over:
                    heapq.heappop(self._due)
                if not self._due:
                    self._is_watched = False
                    return
                deadline, _, first = self._due[0]
                left = deadline - time.monotonic()
                if left > 0:
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
                    continue
                heapq.heappop(self._due)
                too_late = first.too_late
                first.end()
            too_late()
