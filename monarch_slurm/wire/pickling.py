"""Values on the wire: cloudpickle with protocol 5; large buffers travel beside the pickle, uncopied."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle

Buffer = bytes | bytearray | memoryview

OUT_OF_BAND_BYTES = 64 * 1024
"""Buffers of this size and more leave the pickle stream."""


def dumps(value: Any) -> list[Buffer]:
    """Return ``value`` as frames: the pickle first, then its large buffers.

    Raises:
        TypeError or pickle.PicklingError: a part of ``value`` does not pickle; the error is the one that part raised.
    """
    buffers: list[Buffer] = []

    def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous: pickle copies it into the stream
            return True
        if raw.nbytes < OUT_OF_BAND_BYTES:
            return True
        buffers.append(raw)
        return False

    stream = io.BytesIO()
    cloudpickle.Pickler(stream, protocol=5, buffer_callback=keep_in_band).dump(value)
    return [stream.getbuffer(), *buffers]


def loads(frames: Sequence[Buffer]) -> Any:
    """Return the value that `dumps` made ``frames`` of.

    Out-of-band buffers are given writable memory of their own, as if they had been in the pickle.
    """
    return pickle.loads(frames[0], buffers=[bytearray(frame) for frame in frames[1:]])
