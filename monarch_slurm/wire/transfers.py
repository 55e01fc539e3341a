"""How large frames travel between two machines: behind their message, on a payload channel or in pieces on the link.

A message goes at once, with the sizes of its large frames in their place. Their bytes follow on the payload channel
(`payload_channel`) if there is one when a frame begins. Otherwise they follow on the link, in pieces of `PIECE_BYTES`;
only a few are under way until the receiver has taken them, so that what is sent meanwhile waits behind them alone, and
no loop has more than those to do in a round.

The receiver acknowledges each frame that has come by a channel. If the channel ends before that, the frame is sent once
more, on the link.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from monarch_slurm.config import settings
from monarch_slurm.wire.arriving import Arriving
from monarch_slurm.wire.bulk import BULK_BYTES, Bulk, PlainBuffer, in_place
from monarch_slurm.wire.frames import WireError
from monarch_slurm.wire.large_buffers import Buffer
from monarch_slurm.wire.payload_channel import PayloadChannel, Piece
from monarch_slurm.wire.plain import UnpackError, pack, unpack
from monarch_slurm.wire.sealed_records import RECORD_BYTES, Header

PIECE_BYTES = 512 * 1024
WINDOW = 8
"""Pieces that are under way to a peer."""

MAX_PROMISES = 4096
"""Large frames of one message."""

_HEAD = struct.Struct("<QI")
_PROMISED = 1 << 30
"""Flag in the length of a message's header: its last frame says which others follow in pieces."""

PIECE, CREDIT, CHANNEL, WHOLE = 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFFFD, 0xFFFFFFFC
"""In place of that length: no message, but a piece; the news that one was taken; something about a payload channel; or
the news that a frame has come by it."""

_PLACE = struct.Struct("<2Q")
_PROMISE = struct.Struct("<I2Q")


@dataclass
class _Transfer:
    number: int
    frame: Buffer
    view: memoryview | None = None
    at: int = 0
    channel: PayloadChannel | None = None
    """What it goes by; None: the link, or it has not begun."""

    def bytes_from_here(self, size: int) -> memoryview:
        """Return the next ``size`` bytes at most."""
        if self.view is None:
            if isinstance(self.frame, Arriving):
                self.frame = self.frame.whole()
            view = self.frame.view_to_read() if isinstance(self.frame, Bulk) else memoryview(in_place(self.frame))
            self.view = view.cast("B")
        return self.view[self.at : self.at + size]

    def advance(self, size: int) -> bool:
        """Note that so many bytes are sent; return whether those were the last."""
        self.at += size
        return self.at == len(self.frame)

    def begin_again(self) -> None:
        self.at, self.view, self.channel = 0, None, None


class Outbox:
    """What is on its way to one peer. With the lock of its link held.

    Args:
        ready: called, on any thread and without the lock, when there may be pieces to send.
    """

    def __init__(self, ready: Callable[[], None]) -> None:
        self._ready = ready
        self._numbers = 0
        self._transfers: deque[_Transfer] = deque()
        self._credit = WINDOW
        self._unacknowledged: dict[int, _Transfer] = {}
        """What has left by the channel."""
        self.channel: PayloadChannel | None = None
        self.is_waiting = False
        """A channel may open in a moment: only one frame at a time begins on the link until then."""

    def promise(self, frames: list[Buffer]) -> list[Buffer]:
        """Return what is sent of a message at once; the rest is in `pieces`."""
        large = [place for place, frame in enumerate(frames) if place and len(frame) >= BULK_BYTES]
        if not large:
            return frames
        promises = []
        for place in large:
            frame = frames[place]
            promises.append(_PROMISE.pack(place, self._numbers, len(frame)))
            self._transfers.append(_Transfer(self._numbers, frame))
            self._numbers += 1
            if isinstance(frame, Arriving) and not frame.is_done():
                frame.when_done(self._ready)
        number, length = _HEAD.unpack_from(in_place(frames[0]))
        first = _HEAD.pack(number, length | _PROMISED) + memoryview(in_place(frames[0]))[_HEAD.size :]
        rest = [frame for place, frame in enumerate(frames) if place and place not in set(large)]
        return [first, *rest, b"".join(promises)]

    def pieces(self) -> Iterator[tuple[bytes, PlainBuffer]]:
        """Give the pieces that may be sent on the link now: what stands behind the number of each, and its bytes."""
        for _ in range(len(self._transfers)):
            while self._transfers and self._credit and self._goes_by_link(self._transfers[0]):
                transfer = self._transfers[0]
                place = struct.pack("<I", PIECE) + _PLACE.pack(transfer.number, transfer.at)
                lost = _is_lost(transfer.frame)
                piece = memoryview(b"") if lost else transfer.bytes_from_here(PIECE_BYTES)
                self._transfers.popleft()
                self._credit -= 1
                if lost:
                    yield place, piece
                    continue
                if not transfer.advance(len(piece)):
                    if self.is_waiting:
                        self._transfers.appendleft(transfer)
                    else:
                        self._transfers.append(transfer)  # each in its turn
                yield place, piece
            if self.is_waiting and self._transfers and self._transfers[0].at:
                return
            self._transfers.rotate(-1)

    def _goes_by_link(self, transfer: _Transfer) -> bool:
        if _is_coming(transfer.frame) or transfer.channel is not None:
            return False
        return self.channel is None or bool(transfer.at) or _is_lost(transfer.frame)

    def next_piece(self, channel: PayloadChannel) -> Piece | None:
        """Return what is to be sent next by ``channel``; None: nothing now."""
        if channel is not self.channel:
            return None
        for _ in range(len(self._transfers)):
            transfer = self._transfers[0]
            if transfer.channel is channel or not (
                transfer.channel or transfer.at or _is_coming(transfer.frame) or _is_lost(transfer.frame)
            ):
                data = transfer.bytes_from_here(RECORD_BYTES)
                self._transfers.popleft()
                transfer.channel = channel
                piece = Piece(transfer.number, transfer.at, data)
                if transfer.advance(len(data)):
                    transfer.view = None
                    self._unacknowledged[transfer.number] = transfer
                else:
                    self._transfers.append(transfer)  # each in its turn
                return piece
            self._transfers.rotate(-1)
        return None

    def channel_ended(self, channel: PayloadChannel) -> None:
        """Send on the link what has not been acknowledged."""
        if channel is self.channel:
            self.channel = None
        again = [transfer for transfer in self._transfers if transfer.channel is channel]
        again += [transfer for transfer in self._unacknowledged.values() if transfer.channel is channel]
        again.sort(key=lambda transfer: transfer.number)
        others = [transfer for transfer in self._transfers if transfer.channel is not channel]
        for transfer in again:
            self._unacknowledged.pop(transfer.number, None)
            transfer.begin_again()
        self._transfers = deque([*again, *others])

    def acknowledged(self, number: int) -> None:
        """The peer has a frame that has gone by a channel."""
        if self._unacknowledged.pop(number, None) is None:  # the channel has ended meanwhile
            self._transfers = deque(transfer for transfer in self._transfers if transfer.number != number)

    def taken(self, count: int) -> None:
        """The peer has taken so many pieces."""
        self._credit += count


class Inbox:
    """What is on its way here from one peer. For the thread that reads its link; `write_record` for another one."""

    def __init__(self) -> None:
        self._arriving: dict[int, Arriving] = {}
        self._announced = 0
        """Number of the next large frame."""
        self._changed = threading.Condition()
        self._closed = False

    def take(self, frames: list[PlainBuffer]) -> list[Buffer]:
        """Return the frames of a message, those that follow later in their places.

        Raises:
            WireError: they are none.
        """
        number, length = _HEAD.unpack_from(frames[0])
        *kept, promises = frames
        if len(promises) % _PROMISE.size or not 0 < len(promises) <= MAX_PROMISES * _PROMISE.size or not kept:
            raise WireError(f"not a message: {len(promises)} bytes tell which frames follow")
        kept[0] = _HEAD.pack(number, length & ~_PROMISED) + memoryview(frames[0])[_HEAD.size :]
        found: list[Buffer] = list(kept)
        limit = settings().max_frame_length
        announced = list(_PROMISE.iter_unpack(promises))
        for expected, (place, number, size) in enumerate(announced, self._announced):
            if not 0 < place <= len(found) or number != expected or not 0 < size <= limit:
                raise WireError(f"not a message: frame {place} of {size} bytes ({limit} are allowed: max_frame_length)")
            found.insert(place, b"")
        with self._changed:
            for place, number, size in announced:
                found[place] = self._arriving[number] = Arriving(size)
            self._announced += len(announced)
            self._changed.notify_all()
        return found

    def piece(self, frames: Sequence[PlainBuffer]) -> None:
        """Take a piece.

        Raises:
            WireError: it is none, or not the next.
        """
        if len(frames) != 2 or len(frames[0]) != _HEAD.size + _PLACE.size:
            raise WireError(f"not a piece of a large frame: {len(frames)} frames")
        number, at = _PLACE.unpack_from(frames[0], _HEAD.size)
        arriving = self._arriving.get(number)
        if arriving is None:
            if number < self._announced:  # it had come by a channel whose end the sender has seen before the news of it
                return
            raise WireError(f"a piece of the large frame {number}, which was not announced")
        if not len(frames[1]):
            del self._arriving[number]
            arriving.fail("the connection of its sender ended")
        elif arriving.write(at, memoryview(frames[1]).cast("B")):
            del self._arriving[number]

    def write_record(self, channel: PayloadChannel, header: Header, decrypt: Callable[[memoryview], None]) -> bool:
        """Take a record of a channel; return whether its frame is whole, so that `finish` has to be called.

        A record may come before the message that announces its frame, and waits for that. On the channel's thread.

        Raises:
            WireError: it is not the next one.
        """
        number, at, size = header.number, header.at, header.size
        arriving = self._arriving.get(number)
        if arriving is not None and arriving.expects(at, size):
            return arriving.fill(channel, at, size, decrypt)
        # Whether it is genuine decides what is wrong with it, and whether to wait for what it belongs to.
        plain = memoryview(bytearray(size))
        decrypt(plain)
        with self._changed:
            self._changed.wait_for(lambda: number < self._announced or self._closed or channel.closed)
            arriving = self._arriving.get(number)
        if arriving is None:
            raise WireError(f"a record of the large frame {number}, which is not expected")

        def copy(into: memoryview) -> None:
            into[:] = plain

        return arriving.fill(channel, at, size, copy)

    def finish(self, channel: PayloadChannel, number: int) -> bool:
        """Have a frame be there that has come by a channel; false: it is expected on the link again, or not at all."""
        arriving = self._arriving.get(number)
        if arriving is None or not arriving.finish(channel):
            return False
        del self._arriving[number]
        return True

    def wake(self) -> None:
        """Have `write_record` look whether its channel has ended."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing comes any more."""
        with self._changed:
            self._closed = True
            arriving, self._arriving = self._arriving, {}
            self._changed.notify_all()
        for frame in arriving.values():
            frame.fail("the connection ended")


def _is_coming(frame: Buffer) -> bool:
    return isinstance(frame, Arriving) and not frame.is_done()


def _is_lost(frame: Buffer) -> bool:
    return isinstance(frame, Arriving) and frame.is_lost()


def kind_of(frames: Sequence[PlainBuffer]) -> int:
    """Return `PIECE` or `CREDIT`; something else for a message."""
    return int.from_bytes(frames[0][8:12], "little") if len(frames[0]) >= _HEAD.size else 0


def is_promised(frames: Sequence[PlainBuffer]) -> bool:
    """Return whether large frames of a message follow in pieces."""
    return bool(kind_of(frames) & _PROMISED)


def credit(number: int, count: int) -> bytes:
    """Return what tells a peer, as message ``number``, that so many of its pieces were taken."""
    return _HEAD.pack(number, CREDIT) + struct.pack("<I", count)


def credited(frames: Sequence[PlainBuffer]) -> int:
    """Return how many pieces a peer has taken.

    Raises:
        WireError: that is not what came.
    """
    if len(frames) != 1 or len(frames[0]) != _HEAD.size + 4:
        raise WireError("not the news that pieces were taken")
    count: int = struct.unpack_from("<I", frames[0], _HEAD.size)[0]
    if not 0 < count <= WINDOW:
        raise WireError(f"{count} pieces were taken, where at most {WINDOW} are under way")
    return count


def whole(number: int, frame: int) -> bytes:
    """Return what tells a peer, as message ``number``, that its large frame ``frame`` has come by a channel."""
    return _HEAD.pack(number, WHOLE) + struct.pack("<Q", frame)


def whole_frame(frames: Sequence[PlainBuffer]) -> int:
    """Return which large frame a peer has got.

    Raises:
        WireError: that is not what came.
    """
    if len(frames) != 1 or len(frames[0]) != _HEAD.size + 8:
        raise WireError("not the news that a large frame has come")
    frame: int = struct.unpack_from("<Q", frames[0], _HEAD.size)[0]
    return frame


def about_channel(number: int, fields: dict[str, Any]) -> bytes:
    """Return what tells a peer, as message ``number``, something about a payload channel."""
    return _HEAD.pack(number, CHANNEL) + pack(fields)


def said_of_channel(frames: Sequence[PlainBuffer]) -> dict[str, Any]:
    """Return what a peer has said about a payload channel.

    Raises:
        WireError: that is not what came.
    """
    try:
        fields = unpack(memoryview(frames[0])[_HEAD.size :])
    except UnpackError as error:
        raise WireError(f"not what is said about a payload channel: {error!r}") from None
    if len(frames) != 1 or type(fields) is not dict:
        raise WireError("not what is said about a payload channel")
    return fields
