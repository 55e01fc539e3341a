"""A ZeroMQ socket that several threads may send on and one loop reads.

A link numbers what it sends to each peer and checks the numbers of what it receives, so that a message that ZeroMQ lost
(it can, when a connection breaks) is noticed and never taken for silence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import zmq

from monarch_slurm.wire.bulk import PlainBuffer, in_place
from monarch_slurm.wire.frames import PIECE_BYTES, Message, WireError, decode, encode, number_of
from monarch_slurm.wire.large_buffers import Buffer
from monarch_slurm.wire.loop import Loop

MessageHandler = Callable[[str, Message], None]
FaultHandler = Callable[[str, WireError], None]

SOLE_PEER = ""
"""The name of a DEALER's one peer."""

# As plain numbers: ZeroMQ's are enumerations, whose operators take longer than the calls that they are for.
_POLLIN = int(zmq.POLLIN)
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK) | int(zmq.SNDMORE)

_COPY_BYTES = 64 * 1024
"""Frames below this size are copied into ZeroMQ, which is quicker than to share them with it."""

_BATCH = 64
"""Messages that are taken from the socket in one go; senders wait for the socket meanwhile."""


def _as_far_frames(frames: list[Buffer]) -> list[PlainBuffer]:
    """Return frames as they leave the machine: files of memory are mapped, and what is large is cut into pieces."""
    if all(type(frame) is bytes and len(frame) <= PIECE_BYTES for frame in frames):
        return frames  # type: ignore[return-value]
    found: list[PlainBuffer] = []
    for frame in map(in_place, frames):
        if len(frame) <= PIECE_BYTES:
            found.append(frame)
        else:
            view = memoryview(frame)
            found += (view[start : start + PIECE_BYTES] for start in range(0, len(view), PIECE_BYTES))
    return found


class UnknownPeerError(Exception):
    """A ROUTER has no connection to the peer."""


class Link:
    """One DEALER or ROUTER socket on a loop.

    ZeroMQ's descriptor signals edges, not levels: it becomes readable once when messages arrive, and whoever touches
    the socket next takes that signal. So after every touch by another thread than the loop's, the socket is asked
    whether messages wait, and if so the loop is told. No wake-up is lost: a message that arrives after that question
    makes a new edge.

    Args:
        socket: bound or connected; the link owns it from here on.
        on_message: called on the loop's thread with the peer's name and the message, in the order of arrival.
        on_fault: called on the loop's thread when a peer sent what is no message, or a number is missing.
    """

    def __init__(
        self, loop: Loop, socket: zmq.Socket[bytes], on_message: MessageHandler, on_fault: FaultHandler
    ) -> None:
        self._loop = loop
        self._socket = socket
        self._routes = socket.getsockopt(zmq.TYPE) == zmq.ROUTER
        self._on_message = on_message
        self._on_fault = on_fault
        self._lock = threading.Lock()
        self._sent: dict[str, int] = {}
        self._received: dict[str, int] = {}
        self._closed = False
        self._fd = int(socket.getsockopt(zmq.FD))
        loop.call_soon(self._register)

    def _register(self) -> None:
        self._loop.add_reader(self._fd, self.read)
        self.read()

    def send(self, message: Message, peer: str = SOLE_PEER) -> None:
        """Send ``message``; it is in ZeroMQ's hands when this returns. For any thread; keeps the order of one thread.

        Raises:
            UnknownPeerError: this is a ROUTER and ``peer`` is not connected.
        """
        with self._lock:
            if self._closed:
                return
            number = self._sent.get(peer, 0)
            try:
                self._send_frames(peer, _as_far_frames(encode(message, number)))
                self._sent[peer] = number + 1
            finally:
                self._look_again()

    def with_socket(self, use: Callable[[zmq.Socket[bytes]], str]) -> str:
        """Return ``use(socket)``, called while no other thread touches the socket; to listen on one more address."""
        with self._lock:
            result = use(self._socket)
        self._loop.call_soon(self.read)
        return result

    def forget(self, peer: str) -> None:
        """Forget the numbers of ``peer``, which is gone and will not come back under this name."""
        with self._lock:
            self._sent.pop(peer, None)
            self._received.pop(peer, None)

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; what is sent gets ``linger_ms`` to leave. On the loop's thread, or when it does not run."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.remove_reader(self._fd)
                self._socket.close(linger=linger_ms)

    def read(self) -> None:
        """Hand on every message that has arrived. On the loop's thread."""
        drained = False
        while not drained:
            arrived: list[list[bytes]] = []
            with self._lock:
                drained = self._closed
                while not drained and len(arrived) < _BATCH:
                    try:
                        arrived.append(self._socket.recv_multipart(_LAST))
                    except zmq.Again:  # the edge is taken, too: what comes from here on makes a new one
                        drained = True
            for frames in arrived:
                self._take(frames)

    def _send_frames(self, peer: str, frames: list[PlainBuffer]) -> None:
        send = self._socket.send
        try:
            if self._routes:
                send(peer.encode(), _MORE)
            for frame in frames[:-1]:
                send(frame, _MORE, copy=len(frame) < _COPY_BYTES)
            send(frames[-1], _LAST, copy=len(frames[-1]) < _COPY_BYTES)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise UnknownPeerError(peer) from None
            raise

    def _look_again(self) -> None:
        """Tell the loop if the touch just made, even a failed one, took the signal of messages that wait."""
        if self._readable():
            self._loop.call_soon(self.read)

    def _readable(self) -> bool:
        return bool(self._socket.getsockopt(zmq.EVENTS) & _POLLIN)  # type: ignore[operator]

    def _take(self, frames: list[bytes]) -> None:
        peer = SOLE_PEER
        if self._routes:
            peer, frames = frames[0].decode(errors="replace"), frames[1:]
        try:
            message = self._check(peer, frames)
        except WireError as error:
            self._on_fault(peer, error)
            return
        self._on_message(peer, message)

    def _check(self, peer: str, frames: list[bytes]) -> Message:
        number, expected = number_of(frames), self._received.get(peer, 0)
        if number != expected:
            raise WireError(f"message {expected} was lost on the way; {number} came instead")
        self._received[peer] = number + 1
        return decode(frames)
