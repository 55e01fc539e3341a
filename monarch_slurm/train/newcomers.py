"""Connections that have not proved themselves yet: a bounded number of them, and one line of log for those refused.

Whoever is entitled proves it within milliseconds. So when there are too many, the oldest connection makes room for the
newest: a peer still gets in while somebody else opens connections and says nothing.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time

logger = logging.getLogger(__name__)

_MAX_UNPROVED = 128
_CROWDED_PAUSE = 0.002
"""Seconds between two accepted connections while there are so many, so that others of the process can run."""
_LOG_SECONDS = 10.0
_MAX_ADDRESSES = 10


class Newcomers:
    """The connections of one listener that have not proved themselves.

    Args:
        what: name of the listener for the log.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._waiting: dict[socket.socket, str] = {}
        self._refused: dict[str, int] = {}
        self._next_line = 0.0

    def add(self, connection: socket.socket, address: str) -> None:
        """Count a new connection, and hang up the oldest if there are too many."""
        with self._lock:
            self._waiting[connection] = address
            oldest = next(iter(self._waiting)) if len(self._waiting) > _MAX_UNPROVED else None
            if oldest is not None:
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread hears of that
                self._waiting.pop(oldest)
        if oldest is not None:
            time.sleep(_CROWDED_PAUSE)

    def proved(self, connection: socket.socket) -> None:
        """Stop counting a connection: it has proved itself."""
        with self._lock:
            self._waiting.pop(connection, None)

    def refuse(self, connection: socket.socket, address: str, why: str) -> None:
        """Stop counting a connection that proves nothing; log a line unless one was logged a moment ago."""
        with self._lock:
            self._waiting.pop(connection, None)
            if address not in self._refused and len(self._refused) >= _MAX_ADDRESSES:
                address = "other addresses"
            self._refused[address] = self._refused.get(address, 0) + 1
            now = time.monotonic()
            if now < self._next_line:
                return
            self._next_line = now + _LOG_SECONDS
            counts = ", ".join(f"{count} from {address}" for address, count in self._refused.items())
            self._refused.clear()
        logger.warning(
            "connections to %s were refused, nothing was sent: %s (the last one %s)", self._what, counts, why
        )
