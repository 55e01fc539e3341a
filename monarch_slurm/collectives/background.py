"""Errors that RCCL or NCCL meet in the background, and operations that do not end: one thread asks, for all
communicators of the process.

Such an error says that a connection broke, and seldom whose. The control plane mostly knows within milliseconds: it
gets a little time to say which rank is lost, before the communicator is aborted without a name.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

from monarch_slurm.collectives.errors import CollectiveError, PeerLostError
from monarch_slurm.wire.task_limits import start_thread

POLL_S = 0.1
GRACE_S = 1.0


class BackgroundErrors:
    """Asks communicators for errors while they live. For any thread.

    Args:
        poll_s: seconds between two questions.
        grace_s: seconds from an error to the abort, for the control plane to be first.
    """

    def __init__(self, poll_s: float = POLL_S, grace_s: float = GRACE_S) -> None:
        self._poll_s = poll_s
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._watched: weakref.WeakKeyDictionary[Any, float | None] = weakref.WeakKeyDictionary()
        """Transport: when an error was first seen."""
        self._running = False

    def watch(self, transport: Any) -> None:
        """Abort ``transport`` when its library reports an error or an operation is overdue, until it ends by itself."""
        with self._lock:
            self._watched[transport] = None
            if not self._running:
                self._running = True
                start_thread(threading.Thread(target=self._run, name="ccl-errors", daemon=True))

    def _run(self) -> None:
        while True:
            with self._lock:
                transports = list(self._watched)
                if not transports:
                    self._running = False
                    return
            for transport in transports:
                self._look(transport, time.monotonic())
            del transports, transport  # what nobody else holds ends now
            time.sleep(self._poll_s)

    def _look(self, transport: Any, now: float) -> None:
        if transport.failure() is not None or transport.comm.aborted:
            with self._lock:
                self._watched.pop(transport, None)
            return
        late = transport.overdue()
        if late:
            transport.abort(CollectiveError(f"rank {transport.rank} of {transport.size}: {late}"))
            return
        text = transport.comm.async_error()
        if not text:
            return
        with self._lock:
            since = self._watched.get(transport)
            if since is None:
                self._watched[transport] = since = now
        if now - since >= self._grace_s:
            transport.abort(PeerLostError(f"{transport.library} reports {text}"))


background_errors = BackgroundErrors()
