"""Values on the wire: cloudpickle with protocol 5; large buffers travel beside the pickle."""

from __future__ import annotations

import io
import pickle
from collections import ChainMap
from collections.abc import Sequence
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

from monarch_slurm.config import settings
from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.wire.bulk import Bulk, PlainBuffer, in_bulk, in_place

Buffer = PlainBuffer | Bulk

OUT_OF_BAND_BYTES = 64 * 1024
"""Buffers of this size and more leave the pickle stream."""

PIECE_BYTES = 8 * 2**20
"""What is larger travels between machines in pieces of this size and a last one that is smaller, so that no socket need
accept frames of any size: a stranger who announces one is refused before there is memory for it.
"""


class TooLargeError(MonarchSlurmError, ValueError):
    """A value has more bytes than the setting ``max_frame_length`` allows."""


_ATOMS = frozenset((type(None), bool, int, float, str))
"""Types whose pickles name no class, so that the plain pickler writes the same as cloudpickle, ten times as fast."""


_NO_FILE = "<dynamic-code>"
"""What cloudpickle puts in place of the file that a function was defined in."""


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    """Pickle code with the name of its file, which tracebacks, stacks and the debugger tell and read."""
    make, args = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if isinstance(arg, str) and arg == _NO_FILE else arg for arg in args)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)


def dumps(value: Any) -> list[Buffer]:
    """Return ``value`` as frames: the pickle first, then its large buffers.

    The frames are a snapshot: what is done to ``value`` afterwards does not show in them.

    Raises:
        TypeError or pickle.PicklingError: a part of ``value`` does not pickle; the error is the one that part raised.
        TooLargeError: a buffer of it, or all the rest, is larger than the setting ``max_frame_length``.
    """
    if _is_plain(value):
        return _in_pieces([pickle.dumps(value, protocol=5)])
    buffers: list[Buffer] = []

    def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous: pickle copies it into the stream
            return True
        if raw.nbytes < OUT_OF_BAND_BYTES:
            return True
        # Bytes cannot change any more; everything else is copied now, because it leaves after this returns.
        buffers.append(raw if type(raw.obj) is bytes else _copy(raw))
        return False

    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=keep_in_band).dump(value)
    return _in_pieces([stream.getvalue(), *buffers])  # a view of it could not be collected as part of a cycle


def loads(frames: Sequence[Buffer]) -> Any:
    """Return the value that `dumps` made ``frames`` of.

    Out-of-band buffers are given writable memory of their own, as if they had been in the pickle.
    """
    if any(len(frame) == PIECE_BYTES for frame in frames):
        frames = _whole(frames)
    return pickle.loads(in_place(frames[0]), buffers=map(_own, frames[1:]))


def _in_pieces(frames: list[Buffer]) -> list[Buffer]:
    if all(len(frame) < PIECE_BYTES for frame in frames):
        return frames
    limit = settings().max_frame_length
    pieces: list[Buffer] = []
    for frame in frames:
        if len(frame) > limit:
            raise TooLargeError(
                f"a value of {len(frame)} bytes, and {limit} may travel (setting max_frame_length, which is the same "
                "in all processes of the job)"
            )
        # A file stays whole for as long as it does not leave the machine.
        pieces += pieces_of(frame) if not isinstance(frame, Bulk) or len(frame) == PIECE_BYTES else [frame]
    return pieces


def pieces_of(frame: Buffer) -> list[Buffer]:
    """Return ``frame`` in pieces of `PIECE_BYTES`. One that is smaller comes last, so that the last is known."""
    size = len(frame)
    if size < PIECE_BYTES:
        return [frame]
    view = memoryview(in_place(frame))
    pieces: list[Buffer] = [view[start : start + PIECE_BYTES] for start in range(0, size, PIECE_BYTES)]
    return pieces if size % PIECE_BYTES else [*pieces, b""]


def _whole(frames: Sequence[Buffer]) -> list[Buffer]:
    """Return the frames that `_in_pieces` made ``frames`` of."""
    whole: list[Buffer] = []
    pieces: list[Buffer] = []
    for frame in frames:
        pieces.append(frame)
        if len(frame) != PIECE_BYTES:
            whole.append(bytearray().join(map(in_place, pieces)) if len(pieces) > 1 else frame)
            pieces = []
    return whole


def _copy(raw: memoryview) -> Buffer:
    frame = in_bulk(raw)
    return bytes(raw) if frame is raw else frame


def _own(frame: Buffer) -> PlainBuffer:
    """Return memory that nobody else writes to or reads."""
    if isinstance(frame, Bulk):
        return frame.view()
    return frame if type(frame) is bytearray else bytearray(frame)


def to_bytes(value: Any) -> bytes:
    """Return ``value`` as one pickle."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(value)
    return stream.getvalue()


def from_bytes(data: bytes) -> Any:
    """Return the value that `to_bytes` was given."""
    return pickle.loads(data)


def _is_plain(value: Any) -> bool:
    if type(value) in _ATOMS:
        return True
    if type(value) is tuple and len(value) == 2:  # the arguments of a call
        args, kwargs = value
        return (
            type(args) is tuple
            and type(kwargs) is dict
            and _ATOMS.issuperset(map(type, args))
            and _ATOMS.issuperset(map(type, kwargs.values()))
        )
    return False
