"""Threads for transfers: as many as run at a time, kept for a while, never waited for at the end of the program."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_IDLE_SECONDS = 10.0


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
            threading.Thread(target=self._main, args=(function,), name="rdma-work", daemon=True).start()
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
