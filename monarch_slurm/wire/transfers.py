"""How large frames travel between two machines: behind their message, in pieces that small messages pass between.

A message goes at once, with the sizes of its large frames in their place. Their bytes follow in pieces of
`PIECE_BYTES`; only a few are under way until the receiver has taken them, so that what is sent meanwhile waits behind
them alone, and no loop has more than those to do in a round.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from monarch_slurm.config import settings
from monarch_slurm.wire.arriving import Arriving
from monarch_slurm.wire.bulk import BULK_BYTES, PlainBuffer, in_place
from monarch_slurm.wire.frames import WireError
from monarch_slurm.wire.large_buffers import Buffer

PIECE_BYTES = 512 * 1024
WINDOW = 8
"""Pieces that are under way to a peer."""

MAX_PROMISES = 4096
"""Large frames of one message."""

_HEAD = struct.Struct("<QI")
_PROMISED = 1 << 30
"""Flag in the length of a message's header: its last frame says which others follow in pieces."""

PIECE, CREDIT = 0xFFFFFFFF, 0xFFFFFFFE
"""In place of that length: no message, but a piece, or the news that one was taken."""

_PLACE = struct.Struct("<2Q")
_PROMISE = struct.Struct("<I2Q")


@dataclass
class _Transfer:
    number: int
    frame: Buffer
    view: memoryview | None = None
    at: int = 0


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
        """Give the pieces that may be sent now: what stands behind the number of each, and its bytes."""
        for _ in range(len(self._transfers)):
            while self._transfers and self._credit:
                transfer = self._transfers[0]
                if isinstance(transfer.frame, Arriving):
                    if not transfer.frame.is_done():
                        break  # it is still coming here
                    if transfer.frame.is_lost():
                        self._transfers.popleft()
                        self._credit -= 1
                        yield struct.pack("<I", PIECE) + _PLACE.pack(transfer.number, transfer.at), b""
                        continue
                    transfer.frame = transfer.frame.whole()
                if transfer.view is None:
                    transfer.view = memoryview(in_place(transfer.frame)).cast("B")
                piece = transfer.view[transfer.at : transfer.at + PIECE_BYTES]
                place = _PLACE.pack(transfer.number, transfer.at)
                transfer.at += len(piece)
                self._transfers.popleft()
                if transfer.at < len(transfer.view):
                    self._transfers.append(transfer)  # each in its turn
                self._credit -= 1
                yield struct.pack("<I", PIECE) + place, piece
            self._transfers.rotate(-1)

    def taken(self, count: int) -> None:
        """The peer has taken so many pieces."""
        self._credit += count


class Inbox:
    """What is on its way here from one peer. For the thread that reads."""

    def __init__(self) -> None:
        self._arriving: dict[int, Arriving] = {}

    def take(self, frames: list[PlainBuffer]) -> list[Buffer]:
        """Return the frames of a message, those that follow in pieces in their places.

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
        for place, number, size in announced:
            if not 0 < place <= len(found) or number in self._arriving or not 0 < size <= limit:
                raise WireError(f"not a message: frame {place} of {size} bytes ({limit} are allowed: max_frame_length)")
            found.insert(place, b"")
        for place, number, size in announced:
            found[place] = self._arriving[number] = Arriving(size)
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
            raise WireError(f"a piece of the large frame {number}, which was not announced")
        if not len(frames[1]):
            del self._arriving[number]
            arriving.fail("the connection of its sender ended")
        elif arriving.write(at, memoryview(frames[1]).cast("B")):
            del self._arriving[number]

    def close(self) -> None:
        """Nothing comes any more."""
        arriving, self._arriving = self._arriving, {}
        for frame in arriving.values():
            frame.fail("the connection ended")


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
