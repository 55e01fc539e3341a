"""A ZeroMQ socket that several threads may send on and one loop reads.

Large frames follow their message in pieces (`transfers`), so that a link has only a little to do at a time.

A link numbers what it sends to each peer and checks the numbers of what it receives, so that a message that ZeroMQ lost
(it can, when a connection breaks) is noticed and never taken for silence.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Collection
from typing import Any

import zmq

from monarch_slurm.wire.bulk import BULK_BYTES, PlainBuffer, in_place
from monarch_slurm.wire.channel_setup import ChannelSetup
from monarch_slurm.wire.frames import Message, WireError, decode, encode, number_of
from monarch_slurm.wire.large_buffers import Buffer
from monarch_slurm.wire.loop import Loop
from monarch_slurm.wire.payload_channel import PayloadChannel, Piece
from monarch_slurm.wire.sealed_records import Header
from monarch_slurm.wire.tcp_info import TcpConnection
from monarch_slurm.wire.transfers import (
    CHANNEL,
    CREDIT,
    PIECE,
    WHOLE,
    Inbox,
    Outbox,
    about_channel,
    credit,
    credited,
    is_promised,
    kind_of,
    said_of_channel,
    whole,
    whole_frame,
)

MessageHandler = Callable[[str, Message], None]
FaultHandler = Callable[[str, WireError], None]

SOLE_PEER = ""
"""The name of a DEALER's one peer."""

# As plain numbers: ZeroMQ's are enumerations, whose operators take longer than the calls that they are for.
_POLLIN = int(zmq.POLLIN)
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK) | int(zmq.SNDMORE)

_SEQUENCE = struct.Struct("<Q")

_COPY_BYTES = 64 * 1024
"""Frames below this size are copied into ZeroMQ, which is quicker than to share them with it."""

_BATCH = 64
"""Messages that are taken from the socket in one go; senders wait for the socket meanwhile."""


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
        dialled: the address of a DEALER's peer, which payload channels are dialled at, too.
        endpoints: returns the addresses where a ROUTER listens, and payload channels are listened for, too. Without
            one or the other there are no payload channels: they need a link that is encrypted.
    """

    def __init__(
        self,
        loop: Loop,
        socket: zmq.Socket[bytes],
        on_message: MessageHandler,
        on_fault: FaultHandler,
        dialled: str = "",
        endpoints: Callable[[], Collection[str]] | None = None,
    ) -> None:
        self._loop = loop
        self._socket = socket
        self._routes = socket.getsockopt(zmq.TYPE) == zmq.ROUTER
        self._on_message = on_message
        self._on_fault = on_fault
        self._lock = threading.Lock()
        self._sent: dict[str, int] = {}
        self._received: dict[str, int] = {}
        self._outboxes: dict[str, Outbox] = {}
        self._inboxes: dict[str, Inbox] = {}
        self._connections: dict[str, TcpConnection] = {}
        """The connection that each peer's last message came over."""
        self._channels: dict[str, PayloadChannel] = {}
        self._setup: ChannelSetup | None = None
        if dialled or endpoints is not None:
            self._setup = ChannelSetup(
                loop, self._tell_about_channel, self._channel_opened, self._no_channel, dialled, endpoints or tuple
            )
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
            frames = encode(message, self._sent.get(peer, 0))
            large = len(frames) > 1 and any(len(frame) >= BULK_BYTES for frame in frames)
            outbox = self._outboxes.get(peer)
            if large and outbox is None:
                outbox = self._outboxes[peer] = Outbox(lambda: self._loop.call_soon(lambda: self._pump(peer)))
            if large and outbox is not None and outbox.channel is None and self._setup is not None:
                outbox.is_waiting = True
                self._loop.call_soon(lambda: self._ask_for_channel(peer))
            try:
                self._send_numbered(peer, outbox.promise(frames) if outbox is not None else frames)
                if large:
                    self._send_pieces(peer)
            except UnknownPeerError:
                self._outboxes.pop(peer, None)
                raise
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
            self._outboxes.pop(peer, None)
            inbox = self._inboxes.pop(peer, None)
        if inbox is not None:
            inbox.close()
        if self._setup is not None:
            self._setup.forget(peer)
            channel = self._channels.pop(peer, None)
            if channel is not None:
                channel.close("its link has ended")
        self._connections.pop(peer, None)

    def machine_silence(self, peer: str = SOLE_PEER) -> float | None:
        """Return the seconds since the machine of ``peer`` acknowledged something; None if that is not known.

        Its kernel does so for as long as it has power and a network, whatever the process does. On the loop's thread.
        """
        connection = self._connections.get(peer)
        silence = None if connection is None else connection.machine_silence()
        if silence is None:
            self._connections.pop(peer, None)
        return silence

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; what is sent gets ``linger_ms`` to leave. On the loop's thread, or when it does not run."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.remove_reader(self._fd)
                self._socket.close(linger=linger_ms)
                self._outboxes.clear()
        if self._setup is not None:
            self._setup.close()
        for channel in self._channels.values():
            channel.close("its link has ended")
        self._channels.clear()
        for inbox in self._inboxes.values():
            inbox.close()
        self._inboxes.clear()

    def read(self) -> None:
        """Hand on every message that has arrived. On the loop's thread."""
        drained = False
        while not drained:
            arrived: list[tuple[int, list[PlainBuffer]]] = []
            with self._lock:
                drained = self._closed
                while not drained and len(arrived) < _BATCH:
                    try:
                        arrived.append(self._receive())
                    except zmq.Again:  # the edge is taken, too: what comes from here on makes a new one
                        drained = True
            for fd, frames in arrived:
                self._take(fd, frames)

    def _receive(self) -> tuple[int, list[PlainBuffer]]:
        """Return the frames of a message, and the descriptor of the connection that it came over."""
        first: zmq.Frame = self._socket.recv(_LAST, copy=False)  # ZeroMQ tells the descriptor of frames only
        frames: list[PlainBuffer] = [first.bytes]
        more = first.more
        while more:
            if len(frames) == 1 and self._routes:
                frames.append(self._socket.recv(_LAST))
            else:
                frame = self._socket.recv(_LAST, copy=False)
                frames.append(frame.bytes if len(frame) < _COPY_BYTES else frame.buffer)
            more = bool(self._socket.getsockopt(zmq.RCVMORE))
        return int(first.get(zmq.SRCFD)), frames

    def _pump(self, peer: str) -> None:
        """Send what pieces may be sent."""
        with self._lock:
            if not self._closed and peer in self._outboxes:
                try:
                    self._send_pieces(peer)
                except UnknownPeerError:
                    self._outboxes.pop(peer, None)
                finally:
                    self._look_again()

    def _send_pieces(self, peer: str) -> None:
        outbox = self._outboxes[peer]
        for place, piece in outbox.pieces():
            self._send_numbered(peer, [_SEQUENCE.pack(self._sent.get(peer, 0)) + place, piece])
        if outbox.channel is not None:
            outbox.channel.wake_sender()

    def _send_numbered(self, peer: str, frames: list[Buffer]) -> None:
        self._send_frames(peer, [in_place(frame) for frame in frames])
        self._sent[peer] = self._sent.get(peer, 0) + 1

    def _piece_taken(self, peer: str) -> None:
        with self._lock:
            if not self._closed and peer in self._inboxes:
                try:
                    self._send_numbered(peer, [credit(self._sent.get(peer, 0), 1)])
                except UnknownPeerError:
                    return  # it has gone; who watches it knows
                finally:
                    self._look_again()

    # ---- payload channels

    def _ask_for_channel(self, peer: str) -> None:
        if self._setup is not None and peer not in self._channels:
            self._setup.ask(peer)

    def _tell_about_channel(self, peer: str, fields: dict[str, Any]) -> None:
        self._send_quietly(peer, lambda number: about_channel(number, fields))

    def _send_quietly(self, peer: str, frame: Callable[[int], bytes]) -> None:
        with self._lock:
            if not self._closed:
                try:
                    self._send_numbered(peer, [frame(self._sent.get(peer, 0))])
                except UnknownPeerError:
                    return  # it has gone; who watches it knows
                finally:
                    self._look_again()

    def _channel_opened(self, peer: str, channel: PayloadChannel) -> None:
        inbox = self._inboxes.setdefault(peer, Inbox())

        def next_piece(channel: PayloadChannel) -> Piece | None:
            with self._lock:
                outbox = self._outboxes.get(peer)
                return outbox.next_piece(channel) if outbox is not None else None

        def take(channel: PayloadChannel, header: Header, decrypt: Callable[[memoryview], None]) -> None:
            if inbox.write_record(channel, header, decrypt):
                self._loop.call_soon(lambda: finish(header.number))

        def finish(number: int) -> None:
            if inbox.finish(channel, number):
                self._send_quietly(peer, lambda sequence: whole(sequence, number))

        with self._lock:
            outbox = self._outboxes.get(peer)
            if outbox is None:
                outbox = self._outboxes[peer] = Outbox(lambda: self._loop.call_soon(lambda: self._pump(peer)))
            outbox.channel, outbox.is_waiting = channel, False
        self._channels[peer] = channel
        channel.start(next_piece, take, lambda channel, why: self._channel_ended(peer, channel, why))

    def _channel_ended(self, peer: str, channel: PayloadChannel, why: str) -> None:
        if peer in self._inboxes:
            self._inboxes[peer].wake()
        if self._channels.get(peer) is channel:
            del self._channels[peer]
            assert self._setup is not None
            self._setup.broke(peer, why)
            with self._lock:
                if peer in self._outboxes:
                    self._outboxes[peer].channel_ended(channel)
            self._pump(peer)

    def _no_channel(self, peer: str) -> None:
        with self._lock:
            if peer in self._outboxes:
                self._outboxes[peer].is_waiting = False
        self._pump(peer)

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

    def _take(self, fd: int, frames: list[PlainBuffer]) -> None:
        peer = SOLE_PEER
        if self._routes:
            peer, frames = bytes(frames[0]).decode(errors="replace"), frames[1:]
        known = self._connections.get(peer)
        if known is None or known.fd != fd:
            self._note_connection(peer, fd)
        try:
            message = self._check(peer, frames)
        except WireError as error:
            self._on_fault(peer, error)
            return
        if message is not None:
            self._on_message(peer, message)

    def _note_connection(self, peer: str, fd: int) -> None:
        connection = TcpConnection.of(fd)
        if connection is not None:
            self._connections[peer] = connection

    def _check(self, peer: str, frames: list[PlainBuffer]) -> Message | None:
        number, expected = number_of(frames), self._received.get(peer, 0)
        if number != expected:
            raise WireError(f"message {expected} was lost on the way; {number} came instead")
        self._received[peer] = number + 1
        kind = kind_of(frames)
        if kind == PIECE:
            self._inboxes.setdefault(peer, Inbox()).piece(frames)
            self._loop.call_soon(lambda: self._piece_taken(peer))  # in the next round, so that this one has an end
            return None
        if kind == CREDIT:
            count = credited(frames)
            with self._lock:
                if peer in self._outboxes:
                    self._outboxes[peer].taken(count)
            self._pump(peer)
            return None
        if kind == WHOLE:
            frame = whole_frame(frames)
            with self._lock:
                if peer in self._outboxes:
                    self._outboxes[peer].acknowledged(frame)
            return None
        if kind == CHANNEL:
            if self._setup is None:
                raise WireError("a payload channel is asked for on a link that has none")
            self._setup.take(peer, said_of_channel(frames))
            return None
        if not is_promised(frames):
            return decode(frames)
        return decode(self._inboxes.setdefault(peer, Inbox()).take(frames))
