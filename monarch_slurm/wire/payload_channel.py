"""A connection of its own for the bytes of large frames between two hosts, beside that of their messages.

Bytes are encrypted from the memory files of the sender, and decrypted into those of the receiver. In each direction one
thread works on the records and another one on the socket; they run while there is something to do, and the interpreter
is released in both. A connection that is idle has no thread.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from monarch_slurm.wire.frames import WireError
from monarch_slurm.wire.limits import LimitError
from monarch_slurm.wire.loop import Loop
from monarch_slurm.wire.sealed_records import (
    HEADER_BYTES,
    LARGEST_BYTES,
    TAG_BYTES,
    Header,
    Opener,
    Sealer,
    read_header,
)
from monarch_slurm.wire.task_limits import start_thread

BUFFERS = 4
"""Records of one direction that are in memory between the two threads."""

IDLE_SECONDS = 1.0
"""The threads of a direction end after so long without a record."""

KEEPALIVE_SECONDS, KEEPALIVE_PAUSE_SECONDS, KEEPALIVE_PROBES = 15, 5, 3
"""An idle connection is probed this often, so that a firewall on the way does not forget it, or its loss is noticed."""

UNACKNOWLEDGED_SECONDS = 30
"""A connection whose bytes have not been acknowledged for so long has ended (TCP_USER_TIMEOUT of tcp(7))."""

_TIMEVAL = struct.Struct("ll")


class ChannelEndedError(Exception):
    """The other end has closed the connection between two records."""


@dataclass(frozen=True)
class Piece:
    """Bytes that are to be sent: where they belong, and where they are."""

    number: int
    at: int
    data: memoryview


NextPiece = Callable[["PayloadChannel"], "Piece | None"]
TakeRecord = Callable[["PayloadChannel", Header, Callable[[memoryview], None]], None]
ClosedHandler = Callable[["PayloadChannel", str], None]

_Queue = SimpleQueue["tuple[memoryview, int] | None"]


class PayloadChannel:
    """One connection. Both ends have proved that they hold its keys.

    Args:
        connection: owned from here on.
        sealer, opener: of the two directions.
    """

    def __init__(self, loop: Loop, connection: socket.socket, sealer: Sealer, opener: Opener) -> None:
        self._loop = loop
        self._socket = connection
        self._sealer = sealer
        self._opener = opener
        self._lock = threading.Lock()
        self._more = threading.Event()
        self._sending = self._receiving = self._watched = False
        self.closed = False
        self._next_piece: NextPiece = lambda channel: None
        self._take: TakeRecord = lambda channel, header, write: None
        self._on_closed: ClosedHandler = lambda channel, why: None
        _prepare(connection)

    def start(self, next_piece: NextPiece, take: TakeRecord, on_closed: ClosedHandler) -> None:
        """Send and receive from here on. On the loop's thread.

        Args:
            next_piece: returns what is sent next, None if that is nothing now; see `wake_sender`.
            take: called for each record with a function that decrypts it into memory of the size that its header says,
                or raises; raises `WireError` if it has no use for the record.
            on_closed: called once, on the loop's thread, with why the connection has ended.
        """
        self._next_piece, self._take, self._on_closed = next_piece, take, on_closed
        self._watch()
        self.wake_sender()

    def wake_sender(self) -> None:
        """Look for more to send. For any thread."""
        with self._lock:
            self._more.set()
            if self.closed or self._sending:
                return
            self._sending = True
        self._start("send", self._seal, self._write)

    def close(self, why: str) -> None:
        """End the connection. For any thread."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self._more.set()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._loop.call_soon(lambda: self._closed(why))

    def _closed(self, why: str) -> None:
        self._unwatch()
        self._on_closed(self, why)
        self._release()

    def _release(self) -> None:
        """Close the descriptor once no thread uses it, or another connection might get its number."""
        with self._lock:
            if self.closed and not (self._sending or self._receiving or self._watched):
                self._socket.close()

    def _start(
        self, what: str, work: Callable[[_Queue, _Queue], None], next_work: Callable[[_Queue, _Queue], None]
    ) -> None:
        free: _Queue = SimpleQueue()
        full: _Queue = SimpleQueue()
        for _ in range(BUFFERS):
            free.put((memoryview(bytearray(LARGEST_BYTES)), 0))
        try:
            second = threading.Thread(target=next_work, args=(free, full), name=f"payload-{what}-2", daemon=True)
            start_thread(second)
            try:
                first = threading.Thread(target=work, args=(free, full), name=f"payload-{what}", daemon=True)
                start_thread(first)
            except LimitError:
                full.put(None)
                raise
        except LimitError as error:
            if what == "send":
                self._sending = False
            self.close(str(error))

    # ---- sending

    def _seal(self, free: _Queue, full: _Queue) -> None:
        while not self.closed:
            self._more.clear()
            try:
                piece = self._next_piece(self)
            except MemoryError as error:
                self.close(str(error))
                break
            if piece is not None:
                item = free.get()
                assert item is not None
                buffer = item[0]
                full.put((buffer, self._sealer.seal(piece.number, piece.at, piece.data, buffer)))
            elif not self._more.wait(IDLE_SECONDS):
                break
        full.put(None)

    def _write(self, free: _Queue, full: _Queue) -> None:
        while (item := full.get()) is not None:
            if not self.closed:
                try:
                    self._socket.sendall(item[0][: item[1]])
                except OSError as error:
                    self.close(_reason(error))
            free.put(item)
        with self._lock:
            self._sending = False
        self._release()
        if self._more.is_set():  # since the other thread has ended
            self.wake_sender()

    # ---- receiving

    def _watch(self) -> None:
        if not self.closed:
            self._watched = True
            self._loop.add_reader(self._socket.fileno(), self._readable)
        self._release()

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            self._loop.remove_reader(self._socket.fileno())

    def _readable(self) -> None:
        self._unwatch()
        self._receiving = True
        self._start("receive", self._read, self._open)

    def _read(self, free: _Queue, full: _Queue) -> None:
        try:
            while True:
                item = free.get()
                assert item is not None
                buffer = item[0]
                if not self._fill(buffer[:HEADER_BYTES], may_wait=False):
                    break
                end = HEADER_BYTES + read_header(buffer[:HEADER_BYTES]).size + TAG_BYTES
                self._fill(buffer[HEADER_BYTES:end])
                full.put((buffer, end))
        except ChannelEndedError:
            self.close("the other end has closed the connection")
        except OSError as error:
            self.close(_reason(error))
        except WireError as error:
            self.close(str(error))
        full.put(None)

    def _fill(self, view: memoryview, may_wait: bool = True) -> bool:
        """Read as many bytes as ``view`` has; return False if none has come for `IDLE_SECONDS`.

        Args:
            may_wait: wait longer than that.
        """
        got = 0
        while got < len(view):
            try:
                size = self._socket.recv_into(view[got:], 0, socket.MSG_WAITALL)
            except BlockingIOError:  # SO_RCVTIMEO
                if self.closed or not (may_wait or got):
                    return False
                continue
            if not size:
                if got or may_wait:
                    raise WireError("the connection ended within a record")
                raise ChannelEndedError
            got += size
        return True

    def _open(self, free: _Queue, full: _Queue) -> None:
        while (item := full.get()) is not None:
            if not self.closed:
                record = item[0][: item[1]]
                try:
                    self._take(self, read_header(record[:HEADER_BYTES]), partial(self._opener.open, record))
                except WireError as error:
                    self.close(str(error))
                except OSError as error:
                    self.close(f"what has arrived cannot be kept: {_reason(error)}")
            free.put(item)
        self._loop.call_soon(self._received)

    def _received(self) -> None:
        self._receiving = False
        self._watch()


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(None)
    set_option = connection.setsockopt
    set_option(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    set_option(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(int(IDLE_SECONDS), 0))
    set_option(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    set_option(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
    set_option(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_PAUSE_SECONDS)
    set_option(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    set_option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNACKNOWLEDGED_SECONDS)
