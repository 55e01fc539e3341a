"""A TCP or Unix listener for servers that ask each peer for a proof: it survives floods, and a lack of descriptors."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import select
import socket
import threading
import time

from monarch_slurm.wire.admission import LOG_SECONDS, MAX_PER_ORIGIN, MAX_UNPROVED, Admission, StrangerLog
from monarch_slurm.wire.awake_clock import AwakeClock
from monarch_slurm.wire.limits import descriptor_limit
from monarch_slurm.wire.origin import Origin, origin_of

logger = logging.getLogger(__name__)

SHORTAGE_SECONDS = 0.5
"""How long a listener waits when no connection can be taken for lack of descriptors or memory."""

SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
"""Errors of accept(2) that pass when others have closed something; the connection stays in the queue meanwhile."""


class ShortageLog:
    """Tells in one line per `LOG_SECONDS` at most that a listener can take no connection now.

    Args:
        what: begins the line, such as ``cannot take another host's connection``.
        needs: why descriptors run out.
    """

    def __init__(self, what: str, needs: str = "each connection takes one") -> None:
        self._what = what
        self._needs = needs
        self._last = float("-inf")

    def note(self, error: int) -> None:
        """Tell of the error ``error`` of accept(2)."""
        now = time.monotonic()
        if now - self._last < LOG_SECONDS:
            return
        self._last = now
        why = descriptor_limit(self._needs) if error == errno.EMFILE else os.strerror(error)
        logger.error("%s: %s", self._what, why)


class Visitor:
    """A connection of a guarded listener.

    Attributes:
        connection: blocking, without a time-out.
        origin: where it comes from.
    """

    def __init__(self, listener: GuardedListener, connection: socket.socket, origin: Origin) -> None:
        self.connection = connection
        self.origin = origin
        self._listener = listener
        self._lock = threading.Lock()
        self._closed = False
        self._is_counted = False

    def proved(self) -> None:
        """It has proved itself: from here on it counts against no limit, and is never closed by the listener."""
        self._listener._forget(self)

    def refuse(self, detail: str = "") -> None:
        """Close the connection of a peer that has given no proof, and count it as a stranger's if it is not yet."""
        self.close()
        if not self._is_counted:
            self._listener.strangers.note(self.origin, detail)

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        self._listener._forget(self)
        with self._lock:
            self._closed = True
            self.connection.close()

    def hang_up(self) -> None:
        """End the connection, so that whoever reads it, on whatever thread, finds its end. The listener counts it."""
        self._is_counted = True
        with self._lock, contextlib.suppress(OSError):  # the other end may have closed it before
            if not self._closed:
                self.connection.shutdown(socket.SHUT_RDWR)


class GuardedListener:
    """Takes connections; hangs up on those that have not proved themselves in time, or are too many.

    `accept` is for one thread, all else for any. Whoever serves a `Visitor` calls `Visitor.proved` as soon as its proof
    is there, and `Visitor.close` at the end in any case.

    Args:
        listener: listens already; owned from here on.
        name: what it is, for the log, such as ``the port for states``.
        belongs: what those who may connect have and strangers lack, such as ``do not hold this job's key``.
        per_origin: limit of connections without a proof of one address or user.
        total: limit of all connections without a proof.
    """

    def __init__(
        self,
        listener: socket.socket,
        name: str,
        belongs: str,
        per_origin: int = MAX_PER_ORIGIN,
        total: int = MAX_UNPROVED,
    ) -> None:
        self.strangers = StrangerLog(name, belongs)
        self._shortages = ShortageLog(f"{name} can take no connection now, and tries again")
        self._listener = listener
        listener.setblocking(False)
        self.address = listener.getsockname()
        """What `socket.socket.getsockname` returns of it."""
        self._admission: Admission[Visitor] = Admission(per_origin, total)
        self._lock = threading.Lock()
        self._clock = AwakeClock()  # nobody is late because this process was stopped
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._poll.register(self._wake_fd, select.POLLIN)
        self._closed = False
        self._ended = False

    @property
    def unproved(self) -> int:
        """Connections that have not proved themselves."""
        with self._lock:
            return len(self._admission)

    def accept(self) -> Visitor | None:
        """Wait for the next connection and return it; None once this listener is closed."""
        while not self._closed:
            connection = self._next_connection()
            if connection is None:
                continue
            try:
                connection.setblocking(True)
                origin = origin_of(connection)
            except OSError:  # it has hung up already
                connection.close()
                continue
            visitor = Visitor(self, connection, origin)
            with self._lock:
                gone = self._admission.enter(visitor, origin, self._clock.now)
            self._hang_up(gone)
            if any(victim is visitor for victim, _ in gone):
                visitor.close()
                continue
            return visitor
        self._end()
        return None

    def close(self) -> None:
        """Take no more connections. Those that are there stay."""
        with self._lock:
            self._closed = True
            if not self._ended:
                with contextlib.suppress(OSError):
                    self._listener.shutdown(socket.SHUT_RDWR)  # who dials from here on is refused
                os.eventfd_write(self._wake_fd, 1)
        self.strangers.flush()

    def _next_connection(self) -> socket.socket | None:
        """Wait for one; None if there is something else to do first."""
        with self._lock:
            left = self._admission.seconds_left(self._clock.tick())
        ready = self._poll.poll(None if left is None else math.ceil(left * 1000))
        with self._lock:
            late = self._admission.overdue(self._clock.tick(math.inf if left is None else left))
        self._hang_up(late)
        if self._closed or not any(fd != self._wake_fd for fd, _ in ready):
            return None
        try:
            return self._listener.accept()[0]
        except OSError as error:
            if error.errno in SHORTAGES:
                self._shortages.note(error.errno)
                pause = select.poll()
                pause.register(self._wake_fd, select.POLLIN)
                pause.poll(SHORTAGE_SECONDS * 1000)
            return None  # or it has hung up already

    def _hang_up(self, visitors: list[tuple[Visitor, Origin]]) -> None:
        for visitor, origin in visitors:
            self.strangers.note(origin)  # first: who sees the end of a connection finds it counted
            visitor.hang_up()

    def _forget(self, visitor: Visitor) -> None:
        with self._lock:
            self._admission.forget(visitor)

    def _end(self) -> None:
        with self._lock:
            if not self._ended:
                self._ended = True
                self._listener.close()
                os.close(self._wake_fd)
