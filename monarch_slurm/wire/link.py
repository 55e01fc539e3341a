"""A ZeroMQ socket that several threads may send on and one loop reads.

A link numbers what it sends to each peer and checks the numbers of what it receives, so that a message that ZeroMQ lost
(it can, when a connection breaks) is noticed and never taken for silence.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import zmq

from monarch_slurm.wire.frames import Message, WireError, decode, encode, pack_sequence, unpack_sequence
from monarch_slurm.wire.loop import Loop

MessageHandler = Callable[[str, Message], None]
FaultHandler = Callable[[str, WireError], None]

SOLE_PEER = ""
"""The name of a DEALER's one peer."""


class UnknownPeerError(Exception):
    """A ROUTER has no connection to the peer."""


class Link:
    """One DEALER or ROUTER socket on a loop.

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
        self._fd = socket.getsockopt(zmq.FD)
        loop.call_soon(self._register)

    def _register(self) -> None:
        self._loop.add_reader(self._fd, self._read)
        self._read()

    def send(self, message: Message, peer: str = SOLE_PEER) -> None:
        """Send ``message``; it is in ZeroMQ's hands when this returns. For any thread; keeps the order of one thread.

        Raises:
            UnknownPeerError: this is a ROUTER and ``peer`` is not connected.
        """
        frames = encode(message)
        with self._lock:
            if self._closed:
                return
            number = self._sent.get(peer, 0)
            head = [peer.encode()] if self._routes else []
            try:
                self._socket.send_multipart([*head, pack_sequence(number), *frames], zmq.NOBLOCK, copy=False)
            except zmq.ZMQError as error:
                if error.errno == zmq.EHOSTUNREACH:
                    raise UnknownPeerError(peer) from None
                raise
            self._sent[peer] = number + 1
            # Sending runs ZeroMQ's own event processing, which may take the edge that the loop waits for.
            pending = self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN
        if pending:
            self._loop.call_soon(self._read)

    def with_socket(self, use: Callable[[zmq.Socket[bytes]], str]) -> str:
        """Return ``use(socket)``, called while no other thread touches the socket; to listen on one more address."""
        with self._lock:
            return use(self._socket)

    def forget(self, peer: str) -> None:
        """Forget the numbers of ``peer``, which is gone and will not come back under this name."""
        with self._lock:
            self._sent.pop(peer, None)
            self._received.pop(peer, None)

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; what is sent may take up to ``linger_ms`` to leave. On the loop's thread, or when it does not run."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.remove_reader(self._fd)
                self._socket.close(linger=linger_ms)

    def _read(self) -> None:
        while True:
            with self._lock:
                if self._closed or not self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                    return
                arrived: deque[list[bytes]] = deque()
                while self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN and len(arrived) < 64:
                    arrived.append(self._socket.recv_multipart(zmq.NOBLOCK))
            for frames in arrived:
                self._take(frames)

    def _take(self, frames: list[bytes]) -> None:
        peer = SOLE_PEER
        if self._routes:
            peer, frames = frames[0].decode(errors="replace"), frames[1:]
        try:
            if len(frames) < 2:
                raise WireError(f"not a message: {len(frames)} frames")
            number, expected = unpack_sequence(frames[0]), self._received.get(peer, 0)
            if number != expected:
                raise WireError(f"message {expected} was lost on the way; {number} came instead")
            self._received[peer] = number + 1
            message = decode(frames[1:])
        except WireError as error:
            self._on_fault(peer, error)
            return
        self._on_message(peer, message)
