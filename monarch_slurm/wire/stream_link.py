"""Messages between the processes of one machine, over Unix streams: what `Link` is to processes of several machines.

Nobody else than the owner of the socket's folder reaches it, and the kernel tells either end the user of the other. The
first packet of a connection is the name of the one that dials.

The connections have an epoll of their own. The loop watches that one descriptor, unless a thread that has nothing to do
until a message comes reads in its place (`StreamLink.drive`): then no other thread is woken for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from monarch_slurm.wire.bulk import BULK_BYTES, MAX_BULKS, in_bulk
from monarch_slurm.wire.frames import Message, WireError, decode, encode, number_of
from monarch_slurm.wire.large_buffers import Buffer
from monarch_slurm.wire.link import SOLE_PEER, FaultHandler, MessageHandler, UnknownPeerError
from monarch_slurm.wire.loop import Loop
from monarch_slurm.wire.order import Order, QuickHandler
from monarch_slurm.wire.stream import PeerGoneError, dial
from monarch_slurm.wire.stream_listener import StreamListener
from monarch_slurm.wire.stream_peer import Ears, Peer, greeting, name_in

logger = logging.getLogger(__name__)

ClosedHandler = Callable[[str], None]

_ACCEPT_SECONDS = 1.0
"""Pause after a connection that could not be taken."""

_BATCH_BUFFERS = 64
"""Buffers that wait for the end of the round, at most, before they are written."""

_DRIVER_SECONDS = 1.0
"""How long a link that is closed waits for a thread that reads."""

_MOST_READS = 1000

_READABLE = select.EPOLLIN
_WRITABLE = select.EPOLLIN | select.EPOLLOUT


def large_parts_in_files(message: Message) -> None:
    """Copy the large parts of ``message`` into files of memory, once for all whom it is sent to on this machine.

    It takes long, so whoever holds a lock while it sends calls this before it takes the lock.
    """
    if message.encoded is not None and len(message.encoded) > 1:
        message.encoded[1:] = map(in_bulk, message.encoded[1:])
    elif message.encoded is None and any(len(part) >= BULK_BYTES for part in message.body):
        parts = list(message.body)
        message.body = [*map(in_bulk, parts[:MAX_BULKS]), *parts[MAX_BULKS:]]


class StreamLink:
    """Connections with the processes of this machine, on a loop. Make one with `listen` or `connect`.

    Args:
        on_message: called on the loop's thread with the peer's name and the message, in the order of arrival.
        on_fault: called on the loop's thread when a peer sent what is no message; its connection is closed.
        on_closed: called on the loop's thread when a peer has closed its connection, or has ended.
        on_quick: called before ``on_message``, on whatever thread reads; true: it has taken the message.
        batch: the loop's thread alone sends; what it sends in a round leaves at the end of it, in one go.
        peer_kind: what dials this link, for messages.
    """

    def __init__(
        self,
        loop: Loop,
        on_message: MessageHandler,
        on_fault: FaultHandler,
        on_closed: ClosedHandler = lambda peer: None,
        on_quick: QuickHandler = lambda peer, message: False,
        batch: bool = False,
        peer_kind: str = "proc",
    ) -> None:
        self._loop = loop
        self._on_message = on_message
        self._on_fault = on_fault
        self._on_closed = on_closed
        self._on_quick = on_quick
        self._batch = batch
        self._peer_kind = peer_kind
        self._peers: dict[str, Peer] = {}
        self._by_fd: dict[int, Peer] = {}
        self._listener: StreamListener | None = None
        self._epoll = select.epoll()
        self.fd = self._epoll.fileno()
        """Readable when something waits to be read."""
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._reading = threading.Lock()
        self._driver = 0
        self._idle = self._asked_to_leave = False
        self._between: deque[Callable[[], None]] = deque()
        self.order = Order(loop)
        """How what has come is left to the loop's thread."""
        self._closed = False
        loop.call_soon(self._register)

    def _register(self) -> None:
        if not self._closed:
            self._loop.add_reader(self.fd, self.read)

    def listen(self, path: Path) -> None:
        """Take connections on the Unix socket ``path``, from processes of this user only.

        Raises:
            SocketPathError: its folder is not private, or its path is too long.
            BindError: it cannot be listened on.
        """
        self._listener = StreamListener(path, self._epoll, self._peer_kind)

    def connect(self, path: Path, name: str) -> None:
        """Dial the process that listens on ``path``, and be ``name`` there. It is the one peer of this link.

        Raises:
            OSError: nobody listens there.
            StrangerError: it is another user's.
        """
        peer = Peer(dial(path), SOLE_PEER)
        self._write(peer, greeting(name))
        self._add(peer)
        self._peers[SOLE_PEER] = peer

    def adopt(self, connection: socket.socket, name: str, ears: Ears) -> None:
        """Have a connected socket as one more peer, which no one else is called. For any thread."""
        peer = Peer(connection, name, ears)
        self._peers[name] = peer
        self._add(peer)

    # ---- sending

    def send(self, message: Message, peer: str = SOLE_PEER) -> None:
        """Send ``message``: it is in the kernel's hands or in a queue when this returns. For any thread; keeps the
        order of one thread.

        Raises:
            UnknownPeerError: there is no connection with ``peer``.
        """
        if self._closed:
            return
        to = self._peers.get(peer)
        if to is None:
            if peer == SOLE_PEER:
                return  # it is gone, and so will be this process
            raise UnknownPeerError(peer)
        large_parts_in_files(message)
        with to.stream.lock:
            frames = encode(message, to.sent)
            to.sent += 1
            try:
                self._write(to, frames)
            except PeerGoneError:
                if peer != SOLE_PEER:
                    raise UnknownPeerError(peer) from None

    def _write(self, peer: Peer, frames: list[Buffer]) -> None:
        stream = peer.stream
        if stream.ended:
            raise PeerGoneError
        if self._batch:
            stream.write(frames, later=True)
            if len(stream.queue) >= _BATCH_BUFFERS:
                self._flush_locked(peer)
            elif not peer.to_flush:
                peer.to_flush = True
                self._loop.call_after(lambda: self._flush(peer))
        else:
            self._mark(peer, not stream.write(frames))

    def _mark(self, peer: Peer, blocked: bool) -> None:
        if blocked != peer.blocked:
            peer.blocked = blocked
            if peer.stream.fd in self._by_fd:
                self._epoll.modify(peer.stream.fd, _WRITABLE if blocked else _READABLE)

    def _flush(self, peer: Peer) -> None:
        with peer.stream.lock, contextlib.suppress(PeerGoneError):  # what reads it, sees that
            self._flush_locked(peer)

    def _flush_locked(self, peer: Peer) -> None:
        peer.to_flush = False
        if not peer.stream.ended:
            self._mark(peer, not peer.stream.flush())

    # ---- peers

    def knows(self, peer: str) -> bool:
        """Return whether there is a connection with ``peer``. For any thread."""
        return peer in self._peers

    def connected(self, peer: str) -> bool:
        """Return whether there is a connection with ``peer``, after reading what has come from it. On the loop's
        thread.
        """
        there = self._peers.get(peer)
        if there is not None and self._reading.acquire(blocking=False):
            try:
                while self._peers.get(peer) is there and self._read_peer(there):
                    pass
            finally:
                self._reading.release()
        return peer in self._peers

    def forget(self, peer: str) -> None:
        """Close the connection with ``peer``, which is gone. On the loop's thread."""
        gone = self._peers.get(peer)
        if gone is not None:
            self._remove(gone)

    def read_all(self, peer: str) -> None:
        """Read what has come from ``peer`` by now. On the thread that reads, see `between`."""
        there = self._peers.get(peer)
        for _ in range(_MOST_READS):  # more than the kernel keeps
            if there is None or self._peers.get(peer) is not there or not self._read_peer(there):
                return

    def close(self, linger_ms: int = 0) -> None:
        """Close all connections; what is sent gets ``linger_ms`` to leave. On the loop's thread, or when it does not
        run.
        """
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._wake_fd, 1)
        if not self._reading.acquire(timeout=_DRIVER_SECONDS):
            return
        deadline = time.monotonic() + linger_ms / 1000
        for peer in list(self._by_fd.values()):
            self._linger(peer, deadline)
            self._remove(peer)
        self._loop.remove_reader(self.fd)
        if self._listener is not None:
            self._listener.close()
        self._epoll.close()
        os.close(self._wake_fd)

    def _linger(self, peer: Peer, deadline: float) -> None:
        room = select.poll()
        room.register(peer.stream.fd, select.POLLOUT)
        with peer.stream.lock, contextlib.suppress(PeerGoneError):
            while not peer.stream.flush() and (left := deadline - time.monotonic()) > 0:
                room.poll(left * 1000)

    def _accept(self, listener: StreamListener) -> None:
        connection = listener.accept()
        if connection is not None:
            self._add(Peer(connection, None))
        elif listener.paused:
            self.order.hand_over(lambda: self._resume_later(listener))

    def _resume_later(self, listener: StreamListener) -> None:
        self._loop.call_later(_ACCEPT_SECONDS, lambda: None if self._closed else listener.resume())

    def _add(self, peer: Peer) -> None:
        self._by_fd[peer.stream.fd] = peer
        self._epoll.register(peer.stream.fd, _WRITABLE if peer.blocked else _READABLE)

    def _remove(self, peer: Peer) -> None:
        if self._by_fd.pop(peer.stream.fd, None) is peer:
            if peer.name is not None and self._peers.get(peer.name) is peer:
                del self._peers[peer.name]
            with peer.stream.lock:
                self._epoll.unregister(peer.stream.fd)
                peer.stream.close()

    # ---- reading

    def read(self) -> None:
        """Hand on what has arrived. On the loop's thread."""
        if not self._closed and self._reading.acquire(blocking=False):
            try:
                self._serve(self._epoll.poll(0))
            finally:
                self._reading.release()

    def drive(self, done: Callable[[], bool], timeout: float | None = None, idle: bool = False) -> bool:
        """Read on this thread in the loop's place, until ``done()``, which is asked before each wait, or a time-out.

        What `on_quick` takes it takes here; the rest is left to the loop's thread, in order.

        Args:
            timeout: seconds; None: no limit.
            idle: this thread waits for nothing in particular, and leaves for one that does.

        Returns:
            False, at once, if another thread reads.
        """
        if not self.begin(idle):
            return False
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while not done() and not self._closed and not (idle and self._asked_to_leave):
                left = -1.0 if deadline is None else deadline - time.monotonic()
                if deadline is not None and left <= 0:
                    break
                self._serve(self._epoll.poll(left))
        finally:
            self.end()
        return True

    def begin(self, idle: bool) -> bool:
        """Read on this thread from here on, with `take`; see `drive`. False if another thread reads."""
        if self._closed:
            return False
        if not self._reading.acquire(blocking=False):
            if idle or not self._idle:
                return False
            self._asked_to_leave = True
            os.eventfd_write(self._wake_fd, 1)
            taken = self._reading.acquire(timeout=_DRIVER_SECONDS)
            self._asked_to_leave = False
            if not taken:
                return False
        self._idle = idle
        self._driver = threading.get_ident()
        if not self._closed:
            self._loop.pause_reader(self.fd)
        return True

    def take(self) -> None:
        """Hand on what has arrived; between `begin` and `end`."""
        if not self._closed:
            self._serve(self._epoll.poll(0))

    def end(self) -> None:
        """Leave the reading to the loop."""
        self._driver = 0
        self._idle = False
        if not self._closed:
            self._loop.resume_reader(self.fd)
        self._reading.release()

    def between(self, call: Callable[[], None]) -> None:
        """Make a call on the thread that reads, when no message is in its hands. For any thread."""
        self._between.append(call)
        self.interrupt()

    def interrupt(self) -> None:
        """Make a thread that drives ask again whether it is done, this one included: for signal handlers."""
        if not self._closed:
            os.eventfd_write(self._wake_fd, 1)

    def wake(self) -> None:
        """Make a thread that drives ask again whether it is done. For any thread."""
        if self._driver not in (0, threading.get_ident()):
            self.interrupt()

    def _serve(self, ready: Iterable[tuple[int, int]]) -> None:
        for fd, events in ready:
            peer = self._by_fd.get(fd)
            if peer is not None:
                if events & select.EPOLLOUT:
                    self._flush(peer)
                if events & ~select.EPOLLOUT:
                    self._read_peer(peer)
            elif fd == self._wake_fd:
                os.eventfd_read(fd)
                while self._between:
                    self._loop.guard(self._between.popleft())
            elif self._listener is not None and fd == self._listener.fd:
                self._accept(self._listener)

    def _read_peer(self, peer: Peer) -> bool:
        """Return whether anything came."""
        try:
            packets = peer.stream.read()
            for frames in packets:
                self._take(peer, frames)
        except WireError as error:
            name = peer.name or "a process of this machine that has not said its name"
            self._remove(peer)
            if peer.ears is not None:
                peer.ears.on_fault(error)
                return False
            self.order.hand_over(lambda error=error: self._on_fault(name, error))  # type: ignore[misc]
            return False
        if peer.stream.ended:
            named = peer.name is not None and self._peers.get(peer.name) is peer
            self._remove(peer)
            if peer.ears is not None:
                peer.ears.on_closed()
            elif named:
                self.order.hand_over(lambda: self._on_closed(peer.name or SOLE_PEER))
            return False
        return bool(packets)

    def _take(self, peer: Peer, frames: list[Buffer]) -> None:
        name = peer.name
        if name is None:
            self._introduce(peer, frames)
            return
        number = number_of(frames)
        if number != peer.received:
            raise WireError(f"message {peer.received} was lost on the way; {number} came instead")
        peer.received = number + 1
        message = decode(frames)
        if peer.ears is not None:
            peer.ears.on_message(message)
        else:
            self.order.hand_on(name, message, self._on_quick, self._on_message)

    def _introduce(self, peer: Peer, frames: list[Buffer]) -> None:
        name = name_in(frames)
        if name in self._peers or name == SOLE_PEER:
            raise WireError(f"another process is {name!r} here")
        peer.name = name
        self._peers[name] = peer
