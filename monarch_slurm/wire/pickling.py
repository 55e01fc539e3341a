"""Values on the wire: cloudpickle with protocol 5; large buffers, bytes and texts travel beside the pickle.

A value is one frame, its pickle; or, if something in it is large, a head (`Outgoing.frames`) and frames of bytes that
may be cut anywhere. `large_buffers` tells what is copied, and how often.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Sequence
from itertools import islice
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

from monarch_slurm.config import settings
from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.wire.bulk import BULK_BYTES, in_place
from monarch_slurm.wire.large_buffers import Buffer, Incoming, Kind, Outgoing
from monarch_slurm.wire.objects import characters_of
from monarch_slurm.wire.reducers import Reducers

OUT_OF_BAND_BYTES = 64 * 1024
"""Buffers of this size and more leave the pickle stream. From this size on CPython's pickler writes bytes and texts as
they are, without a copy (FRAME_SIZE_TARGET)."""


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


_reducers = Reducers({CodeType: _reduce_code}, *cloudpickle.Pickler.dispatch_table.maps)
_own_reducers: dict[type, Any] = _reducers.own


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar[Any] = _reducers

    def reducer_override(self, value: Any) -> Any:
        # CPython asks this before the table: a value of the table needs none of cloudpickle's questions.
        reduce = _own_reducers.get(type(value))
        return super().reducer_override(value) if reduce is None else reduce(value)


class _TextPickler(_Pickler):
    """Puts large ASCII texts beside the pickle, which CPython's pickler would copy first; slower for all the rest."""

    def __init__(self, writer: _Writer) -> None:
        super().__init__(writer, protocol=5, buffer_callback=writer.buffer)
        self._writer = writer

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is str and len(value) >= BULK_BYTES and value.isascii():
            return self._writer.text(value)
        return None


_FRAME, _NEXT_BUFFER = 0x95, b"\x97"
_SHORT, _LONG = struct.Struct("<BI"), struct.Struct("<BQ")
_OPCODES = {
    _SHORT.size: {ord("B"): Kind.BYTES, ord("X"): Kind.TEXT},
    _LONG.size: {0x8E: Kind.BYTES, 0x8D: Kind.TEXT, 0x96: Kind.BYTEARRAY},
}
"""What announces large bytes, texts and bytearrays in a pickle, by the length of the announcement."""


class _Writer:
    """The file that a pickler writes to. What is large goes beside the pickle.

    CPython's pickler hands bytes, bytearrays and texts of `OUT_OF_BAND_BYTES` and more to ``write`` alone, right behind
    the opcode with their length. In place of both stands the opcode for a buffer that is beside the pickle. What is not
    recognised stays in the pickle, which is right as well.
    """

    def __init__(self) -> None:
        self.outgoing = Outgoing()
        self.parts: list[bytes] = []
        self._texts: dict[int, tuple[int, str]] = {}
        """Large texts and their numbers, by their address; referred to here, so that no other gets it."""
        self._limit = settings().max_frame_length

    def write(self, piece: Any) -> int:
        size = len(piece)
        if size >= OUT_OF_BAND_BYTES and self.parts and not _is_frame(piece):
            for length, kinds in _OPCODES.items():
                opcode, announced = (_SHORT if length == _SHORT.size else _LONG).unpack(
                    self.parts[-1][-length:].rjust(length, b"\0")
                )
                if announced == size and opcode in kinds:
                    self.parts[-1] = self.parts[-1][:-length] + _NEXT_BUFFER
                    self._add(memoryview(piece), kinds[opcode])
                    return size
        self.parts.append(bytes(piece))
        return size

    def buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Return whether a buffer stays in the pickle."""
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous: pickle copies it into the stream
            return True
        if raw.nbytes < OUT_OF_BAND_BYTES:
            return True
        self._add(raw, Kind.BUFFER)
        return False

    def text(self, text: str) -> int:
        """Put an ASCII text beside the pickle; return its number."""
        if id(text) not in self._texts:
            self.check(len(text))
            with characters_of(text) as view:
                self._texts[id(text)] = self.outgoing.add(view, Kind.ASCII), text
        return self._texts[id(text)][0]

    def frames(self) -> list[Buffer]:
        stream = b"".join(self.parts)
        self.check(len(stream))
        if len(stream) >= OUT_OF_BAND_BYTES:
            self.outgoing.add(memoryview(stream), Kind.STREAM)
            stream = b""
        return self.outgoing.frames(stream) if self.outgoing.size else [stream]

    def _add(self, data: memoryview, kind: Kind) -> None:
        self.check(len(data))
        self.outgoing.add(data, kind)

    def check(self, size: int) -> None:
        if size > self._limit:
            raise TooLargeError(
                f"a value of {size} bytes; at most {self._limit} are allowed (setting max_frame_length, which is the "
                "same in all processes of the job)"
            )


def _is_frame(piece: Any) -> bool:
    """Return whether the pickler has written one of the frames that it makes of small things, and not a payload."""
    if piece[0] != _FRAME:
        return False
    rest: int = len(piece) - _LONG.size - _LONG.unpack_from(piece)[1]
    return 0 <= rest <= _LONG.size


def dumps(value: Any) -> list[Buffer]:
    """Return ``value`` as frames: its pickle, or a head and what is large in it.

    The frames are a snapshot: what is done to ``value`` afterwards does not show in them.

    Raises:
        TypeError or pickle.PicklingError: a part of ``value`` does not pickle; the error is the one that part raised.
        TooLargeError: a buffer of it, or all the rest, is larger than the setting ``max_frame_length``.
    """
    if _is_plain(value) and len(data := pickle.dumps(value, protocol=5)) < OUT_OF_BAND_BYTES:
        return [data]
    _reducers.find_libraries()
    writer = _Writer()
    try:
        if _has_large_text(value):
            _TextPickler(writer).dump(value)
        else:
            _Pickler(writer, protocol=5, buffer_callback=writer.buffer).dump(value)
        return writer.frames()
    except BaseException:
        writer.outgoing.discard()
        raise


def loads(frames: Sequence[Buffer]) -> Any:
    """Return the value that `dumps` made ``frames`` of.

    What was beside the pickle is given memory of its own, and is as writable as if it had been in the pickle.
    """
    if len(frames) == 1:
        return pickle.loads(in_place(frames[0]))
    incoming = Incoming(frames)
    if not incoming.has_texts:
        return pickle.loads(incoming.stream, buffers=incoming.buffers())
    unpickler = _Unpickler(io.BytesIO(incoming.stream), buffers=incoming.buffers())
    unpickler.persistent_load = incoming.text
    return unpickler.load()


class _Unpickler(pickle.Unpickler):
    persistent_load: Any


def to_bytes(value: Any) -> bytes:
    """Return ``value`` as one pickle."""
    _reducers.find_libraries()
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(value)
    return stream.getvalue()


def from_bytes(data: bytes) -> Any:
    """Return the value that `to_bytes` was given."""
    return pickle.loads(data)


def _is_small(value: Any) -> bool:
    kind = type(value)
    return kind in _ATOMS and (kind is not str or len(value) < OUT_OF_BAND_BYTES)


def _is_plain(value: Any) -> bool:
    if type(value) is tuple and len(value) == 2:  # the arguments of a call
        args, kwargs = value
        return (
            type(args) is tuple
            and type(kwargs) is dict
            and all(map(_is_small, args))
            and all(map(_is_small, kwargs.values()))
        )
    return _is_small(value)


_LOOK_AT = 1000
"""Items of containers that are looked at, in search of large texts."""


def _has_large_text(value: Any) -> bool:
    """Return whether a large text is found in ``value``; one that is missed is copied once more."""
    found: list[Any] = [value]
    for item in found:
        kind = type(item)
        if kind is str:
            if len(item) >= BULK_BYTES:
                return True
        elif kind in (tuple, list, set, dict) and len(found) < _LOOK_AT:
            found += islice(item.values() if kind is dict else item, _LOOK_AT)
    return False
