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

Buffer = bytes | bytearray | memoryview

OUT_OF_BAND_BYTES = 64 * 1024
"""Buffers of this size and more leave the pickle stream."""

PIECE_BYTES = 8 * 2**20
"""What is larger travels in pieces of this size and a last one that is smaller, so that no socket need accept frames of
any size: a stranger who announces one is refused before there is memory for it.
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
        buffers.append(raw if type(raw.obj) is bytes else bytes(raw))
        return False

    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=keep_in_band).dump(value)
    return _in_pieces([stream.getbuffer(), *buffers])


def loads(frames: Sequence[Buffer]) -> Any:
    """Return the value that `dumps` made ``frames`` of.

    Out-of-band buffers are given writable memory of their own, as if they had been in the pickle.
    """
    if any(len(frame) == PIECE_BYTES for frame in frames):
        frames = _whole(frames)
    buffers = [frame if type(frame) is bytearray else bytearray(frame) for frame in frames[1:]]
    return pickle.loads(frames[0], buffers=buffers)


def _in_pieces(frames: list[Buffer]) -> list[Buffer]:
    if all(len(frame) < PIECE_BYTES for frame in frames):
        return frames
    limit = settings().max_frame_length
    pieces: list[Buffer] = []
    for frame in frames:
        size = len(frame)
        if size > limit:
            raise TooLargeError(
                f"a value of {size} bytes, and {limit} may travel (setting max_frame_length, which is the same in all "
                "processes of the job)"
            )
        view = memoryview(frame)
        # The last piece is smaller than the others, empty if need be: so it is known as the last.
        pieces += [view[start : start + PIECE_BYTES] for start in range(0, size, PIECE_BYTES)]
        if size and size % PIECE_BYTES == 0:
            pieces.append(b"")
    return pieces


def _whole(frames: Sequence[Buffer]) -> list[Buffer]:
    """Return the frames that `_in_pieces` made ``frames`` of."""
    whole: list[Buffer] = []
    pieces: list[Buffer] = []
    for frame in frames:
        pieces.append(frame)
        if len(frame) < PIECE_BYTES:
            whole.append(bytearray().join(pieces) if len(pieces) > 1 else frame)
            pieces = []
    return whole


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
