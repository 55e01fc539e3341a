"""One Unix stream connection between two processes of a machine: packets of frames in both directions.

A packet is the number of its frames (4 bytes), the length of each (8 bytes), and the frames. Neither end has a thread
for it: whoever sends writes, and what does not fit into the socket waits in a queue until there is room.

A large frame is not among them: its length is marked, and the descriptor of a file with its bytes (`Bulk`) goes along
with the head of the packet.
"""

from __future__ import annotations

import array
import errno
import itertools
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from monarch_slurm.config import settings
from monarch_slurm.wire.bulk import BULK_BYTES, MAX_BULKS, Bulk, PlainBuffer, in_bulk, in_place, taken
from monarch_slurm.wire.frames import WireError
from monarch_slurm.wire.large_buffers import Buffer
from monarch_slurm.wire.limits import descriptor_limit

MAX_FRAMES = 1 << 16
"""Frames that one packet may have."""

_COUNT = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
_WINDOW_BYTES = 128 * 1024
"""How much is read in one go."""

_LARGE_BYTES = 64 * 1024
"""A frame of this size and more that has not arrived whole is read straight to where it stays."""

_BUFFERS = 512
"""Buffers that are written in one go; the kernel takes 1,024."""

_BULK = 1 << 63
"""Mark of the length of a frame whose descriptor comes along."""

_DESCRIPTOR_SPACE = socket.CMSG_SPACE(4 * MAX_BULKS)
_Entry = tuple[memoryview, tuple[Bulk, ...]]
"""Bytes that wait to be written, and the files that go with the first of them."""

_SEND_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class PeerGoneError(Exception):
    """The other end of a connection is gone."""


class StrangerError(WireError):
    """The other end of a connection belongs to another user."""

    uid: int | None = None
    """That user."""


def check_peer(connection: socket.socket) -> None:
    """Make sure that the other end belongs to this user; the kernel says so.

    Raises:
        StrangerError: it does not.
    """
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.getuid():
        stranger = StrangerError(f"the other end belongs to uid {uid} (pid {pid}), not to uid {os.getuid()}")
        stranger.uid = uid
        raise stranger


def dial(path: Path) -> socket.socket:
    """Return a connection to the process that listens on the Unix socket ``path``.

    Raises:
        OSError: nobody listens there.
        StrangerError: it is another user's.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(os.fspath(path))
        check_peer(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _sort_out(frames: Sequence[Buffer]) -> tuple[list[int], list[PlainBuffer], list[Bulk]]:
    """Return the lengths of frames as they are written, those that are written, and those that go along."""
    lengths: list[int] = []
    plain: list[PlainBuffer] = []
    bulks: list[Bulk] = []
    for frame in map(in_bulk, frames):
        if isinstance(frame, Bulk) and len(bulks) < MAX_BULKS:
            bulks.append(frame)
            lengths.append(len(frame) | _BULK)
        else:
            plain.append(in_place(frame))
            lengths.append(len(frame))
    return lengths, plain, bulks


class Stream:
    """One connected Unix socket.

    Writes are for any thread. Reads are for one thread at a time.

    Args:
        connection: connected; the stream owns it from here on.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self.fd = connection.fileno()
        self.lock = threading.Lock()
        """Guards writing; to be held by whoever calls `write`, `flush` or `close`."""
        self.queue: deque[_Entry] = deque()
        """What has not left yet."""
        self.ended = False
        """Whether the other end has closed, and all that it sent has been read."""
        self._max_frame = settings().max_frame_length
        self._window = memoryview(bytearray(_WINDOW_BYTES))
        self._rest = b""
        self._lengths: deque[int] = deque()
        self._frames: list[Buffer] = []
        self._descriptors: deque[int] = deque()
        self._hole: memoryview | None = None
        """The part of a large frame that has not arrived."""

    # ---- writing

    def write(self, frames: Sequence[Buffer], later: bool = False) -> bool:
        """Send a packet; return whether all that was written until now has left. If not, `flush` has to be called.

        Args:
            later: only queue it.

        Raises:
            PeerGoneError: the other end is gone.
        """
        lengths = list(map(len, frames))
        bulks: list[Bulk] = []
        plain: Sequence[PlainBuffer] = frames  # type: ignore[assignment]
        if max(lengths) >= BULK_BYTES:
            lengths, plain, bulks = _sort_out(frames)
        head = struct.pack(f"<I{len(lengths)}Q", len(lengths), *lengths)
        if self.queue or later or bulks or len(frames) >= _BUFFERS:
            waits = later or bool(self.queue)
            self._enqueue(head, plain, tuple(bulks))
            return not waits and self.flush()
        try:
            sent = self._socket.sendmsg([head, *plain], (), _SEND_FLAGS)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise PeerGoneError(str(error)) from None
        if sent == len(head) + sum(lengths):
            return True
        self._enqueue(head, plain, ())
        self._advance(sent)
        return False

    def _enqueue(self, head: bytes, frames: Sequence[PlainBuffer], bulks: tuple[Bulk, ...]) -> None:
        self.queue.append((memoryview(head), bulks))
        self.queue.extend((memoryview(frame), ()) for frame in frames if len(frame))

    def flush(self) -> bool:
        """Write what is queued, as far as there is room; return whether nothing is left.

        Raises:
            PeerGoneError: the other end is gone.
        """
        while self.queue:
            bulks = self.queue[0][1]
            views = [self.queue[0][0]]
            for view, others in itertools.islice(self.queue, 1, _BUFFERS):
                if others:
                    break
                views.append(view)
            along = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [bulk.fd for bulk in bulks]))]
            try:
                sent = self._socket.sendmsg(views, along if bulks else (), _SEND_FLAGS)
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:  # files that nobody has taken yet; they will be
                    return False
                self.queue.clear()
                raise PeerGoneError(str(error)) from None
            self._advance(sent)
        return True

    def _advance(self, sent: int) -> None:
        queue = self.queue
        while sent:
            first = queue[0][0]
            if len(first) > sent:
                queue[0] = first[sent:], ()
                return
            sent -= len(first)
            queue.popleft()

    # ---- reading

    def read(self) -> list[list[Buffer]]:
        """Return the packets that are complete with what arrives now; none if nothing does.

        Raises:
            WireError: what arrived is no packet. The stream is of no use any more.
        """
        packets: list[list[Buffer]] = []
        if self._hole is not None:
            self._fill()
            if self._hole is None and self._lengths:
                self._rest = self._parse(b"", packets)  # what comes next may need no more bytes
            elif self._hole is None:
                packets.append(self._frames)
                self._frames = []
            return packets
        size = self._receive(self._window)
        if size:
            arrived = bytes(self._window[:size])
            self._rest = self._parse(self._rest + arrived if self._rest else arrived, packets)
        return packets

    def close(self) -> None:
        """Close the connection, with the lock held; what has been written still arrives."""
        self.queue.clear()
        self.ended = True
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _receive(self, into: memoryview) -> int:
        try:
            size, along, flags, _ = self._socket.recvmsg_into([into], _DESCRIPTOR_SPACE, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return 0
        except OSError:
            size, along, flags = 0, [], 0
        for level, kind, data in along:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._descriptors.extend(array.array("i", data[: len(data) // 4 * 4]))
        if flags & socket.MSG_CTRUNC:
            raise WireError(f"a large buffer could not be taken: {descriptor_limit('each takes one on its way')}")
        self.ended = self.ended or size == 0
        return size

    def _fill(self) -> None:
        while self._hole is not None:
            size = self._receive(self._hole)
            if size == 0:
                return
            self._hole = self._hole[size:] if size < len(self._hole) else None

    def _take_bulk(self, size: int) -> Bulk:
        if not self._descriptors:
            raise WireError("a large buffer was announced, and did not come along")
        bulk = taken(self._descriptors.popleft(), size)
        if not bulk.is_whole():
            raise WireError(f"a large buffer is not {size} sealed bytes of memory")
        return bulk

    def _parse(self, data: bytes, packets: list[list[Buffer]]) -> bytes:
        """Take packets off ``data``; return what is left of it."""
        at, end = 0, len(data)
        while True:
            if not self._lengths:
                if end - at < _COUNT.size:
                    return data[at:]
                (count,) = _COUNT.unpack_from(data, at)
                if not 0 < count <= MAX_FRAMES:
                    raise WireError(f"not a packet: {count} frames")
                start = at + _COUNT.size + 8 * count
                if end < start:
                    return data[at:]
                lengths = struct.unpack_from(f"<{count}Q", data, at + _COUNT.size)
                longest = max(length & ~_BULK for length in lengths) if count > 1 else lengths[0] & ~_BULK
                if longest > self._max_frame:
                    raise WireError(
                        f"a frame of {longest} bytes; {self._max_frame} are allowed (setting max_frame_length)"
                    )
                self._lengths.extend(lengths)
                at = start
            while self._lengths:
                length = self._lengths[0]
                if length & _BULK:
                    self._frames.append(self._take_bulk(length & ~_BULK))
                elif end - at >= length:
                    self._frames.append(data[at : at + length])
                    at += length
                elif length >= _LARGE_BYTES:
                    frame = bytearray(length)
                    frame[: end - at] = data[at:]
                    self._frames.append(frame)
                    self._hole = memoryview(frame)[end - at :]
                    at = end
                else:
                    return data[at:]
                self._lengths.popleft()
                if self._hole is not None:
                    return b""
            packets.append(self._frames)
            self._frames = []
