"""Values on the wire: cloudpickle with protocol 5; large buffers travel beside the pickle."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle

Buffer = bytes | bytearray | memoryview

OUT_OF_BAND_BYTES = 64 * 1024
"""Buffers of this size and more leave the pickle stream."""

_ATOMS = frozenset((type(None), bool, int, float, str))
"""Types whose pickles name no class, so that the plain pickler writes the same as cloudpickle, ten times as fast."""


def dumps(value: Any) -> list[Buffer]:
    """Return ``value`` as frames: the pickle first, then its large buffers.

    The frames are a snapshot: what is done to ``value`` afterwards does not show in them.

    Raises:
        TypeError or pickle.PicklingError: a part of ``value`` does not pickle; the error is the one that part raised.
    """
    if _is_plain(value):
        return [pickle.dumps(value, protocol=5)]
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
    cloudpickle.Pickler(stream, protocol=5, buffer_callback=keep_in_band).dump(value)
    return [stream.getbuffer(), *buffers]


def loads(frames: Sequence[Buffer]) -> Any:
    """Return the value that `dumps` made ``frames`` of.

    Out-of-band buffers are given writable memory of their own, as if they had been in the pickle.
    """
    return pickle.loads(frames[0], buffers=[bytearray(frame) for frame in frames[1:]])


def to_bytes(value: Any) -> bytes:
    """Return ``value`` as one pickle."""
    pickled: bytes = cloudpickle.dumps(value, protocol=5)
    return pickled


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
