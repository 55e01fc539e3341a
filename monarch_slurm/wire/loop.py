"""The I/O loop of a process: file descriptors, timers and calls from other threads, on one thread."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from monarch_slurm.wire.awake_clock import AwakeClock
from monarch_slurm.wire.process_end import LOOK_SECONDS, ProcessEnd
from monarch_slurm.wire.task_limits import start_thread

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

_STALE_SECONDS = 0.05
"""Before timers fire this long after the descriptors were looked at, the loop looks at them once more."""


class Timer:
    """A call that is due at a time; `cancel` takes it back."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Make sure that the call does not happen any more."""
        self._callback = None

    @property
    def pending(self) -> bool:
        """Whether the call has neither happened nor been taken back."""
        return self._callback is not None

    def _fire(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class Loop:
    """Runs callbacks when descriptors are readable, timers are due or other threads ask.

    A callback that raises is a fault of this package: it is logged with its traceback and the loop goes on, since one
    broken message must not cost the process its other links.

    What has arrived is read before a timer fires that this loop was too late for: a timer that judges others by their
    silence finds what they have sent.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self._epoll = select.epoll()
        self._readers: dict[int, Callable[[], None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._runs_on = 0
        self._wakeup: tuple[socket.socket, ...] = ()
        self._awake = AwakeClock(clock)
        self._reads_first = False
        """Timers wait for this round, so that it reads before they fire."""

    @property
    def awake(self) -> float:
        """Seconds in which this loop could hear others; time in which its process was stopped or held up is left out.
        For any thread.
        """
        return self._awake.now

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        """Call ``callback`` whenever ``fd`` is readable or hung up."""
        self._readers[fd] = callback
        self._epoll.register(fd, select.EPOLLIN)

    def remove_reader(self, fd: int) -> None:
        """Forget ``fd``; do so before closing it."""
        if self._readers.pop(fd, None) is not None and not self._epoll.closed:
            self._epoll.unregister(fd)

    def pause_reader(self, fd: int) -> None:
        """Do not look at ``fd`` until `resume_reader`. For any thread."""
        self._look_for(fd, 0)

    def resume_reader(self, fd: int) -> None:
        """Look at ``fd`` again. For any thread."""
        self._look_for(fd, select.EPOLLIN)

    def _look_for(self, fd: int, events: int) -> None:
        if fd in self._readers:
            with contextlib.suppress(OSError, ValueError):  # the loop may just have ended
                self._epoll.modify(fd, events)

    def watch_process(self, pid: int, ended: Callable[[], None]) -> None:
        """Call ``ended`` once when the process has ended; it may still have to be waited for.

        Raises:
            ProcessLookupError: there is no such process.
        """
        process = ProcessEnd(pid)

        def look() -> None:
            if process.fd is None and not process.has_ended_in_proc():
                self.call_later(LOOK_SECONDS, look)
                return
            if process.fd is not None:
                self.remove_reader(process.fd)
                process.close()
            ended()

        if process.fd is None:
            self.call_soon(look)
        else:
            self.add_reader(process.fd, look)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call ``callback`` on the loop's thread after ``seconds``. For the loop's own thread, or before it runs."""
        timer = Timer(callback)
        heapq.heappush(self._timers, (self.clock() + seconds, next(self._order), timer))
        return timer

    def call_at_deadline(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call ``callback`` when others have had ``seconds`` for something. Time in which this process could not have
        noticed that they were done does not count. For the loop's own thread, or before it runs.
        """
        end = self.awake + seconds
        deadline = Timer(callback)

        def look() -> None:
            left = end - self.awake
            if left <= 0:
                deadline._fire()
            elif deadline.pending:
                self.call_later(left, look)

        self.call_later(seconds, look)
        return deadline

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on the loop's thread as soon as it can. For any thread."""
        self._calls.append(callback)
        self.wake()

    def call_after(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` after what is ready now. For the loop's own thread, or before it runs."""
        self._calls.append(callback)

    def call_on_signals(self, numbers: Iterable[int], callback: Callable[[], None]) -> None:
        """Call ``callback`` on the loop's thread when one of these signals comes. From the main thread."""
        for number in numbers:
            signal.signal(number, lambda *_: self.call_soon(callback))
        read, write = socket.socketpair()
        write.setblocking(False)
        signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        self._wakeup = read, write  # or they would be closed
        self.add_reader(read.fileno(), lambda: _discard(read))

    def wake(self) -> None:
        """Make the loop's thread look at its calls. For any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def is_here(self) -> bool:
        """Return whether this thread is the loop's, or the loop does not run."""
        return self._runs_on in (0, threading.get_ident())

    def start(self, name: str) -> None:
        """Run the loop on a daemon thread of its own.

        Raises:
            LimitError: the thread cannot be started.
        """
        self._thread = threading.Thread(target=self.run, name=name, daemon=True)
        start_thread(self._thread)

    def stop(self) -> None:
        """End `run` after the round in hand. For any thread."""
        self._stopping = True
        self.wake()

    def join(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for the thread that `start` made."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def run(self) -> None:
        """Run until `stop`."""
        self._runs_on = threading.get_ident()
        while not self._stopping:
            self._round()
        self._runs_on = 0
        self._epoll.close()

    def run_until(self, done: Callable[[], bool]) -> None:
        """Go on inside of a callback, until ``done`` or `stop`. On the loop's thread."""
        while not (done() or self._stopping):
            self._round()

    def _round(self) -> None:
        timeout = -1.0
        if self._calls:
            timeout = 0.0
        elif self._timers:
            timeout = max(0.0, self._timers[0][0] - self.clock())
        self._awake.tick()
        ready = self._epoll.poll(timeout)
        self._awake.tick(timeout if timeout >= 0 else math.inf)
        looked_at = self.clock()
        for fd, _ in ready:
            if fd == self._wake_fd:
                os.eventfd_read(fd)
            else:
                self.guard(self._readers.get(fd))
        # The calls that are there now; those that they add wait for the next round, after the descriptors.
        for _ in range(len(self._calls)):
            if self._calls:  # a call that waits inside of its own rounds takes others
                self.guard(self._calls.popleft())
        self._fire_timers(looked_at)

    def _fire_timers(self, looked_at: float) -> None:
        fired = False
        now = self.clock()
        while self._timers and self._timers[0][0] <= now:
            # At least one timer fires in every second round, however long rounds take.
            if self.clock() - looked_at > _STALE_SECONDS and (fired or not self._reads_first):
                self._reads_first = True
                return
            fired = True
            self.guard(heapq.heappop(self._timers)[2]._fire)
        self._reads_first = False

    @staticmethod
    def guard(callback: Callable[[], None] | None) -> None:
        """Call ``callback``; what it raises is logged."""
        if callback is None:
            return
        try:
            callback()
        except Exception:
            logger.exception("a callback of the I/O loop failed")


def _discard(end: socket.socket) -> None:
    end.recv(512)
