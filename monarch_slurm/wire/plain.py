"""Plain values (numbers, texts, lists, maps) as bytes: msgpack, which can name no class and run no code."""

from __future__ import annotations

from typing import Any

import msgpack  # type: ignore[import-untyped]

from monarch_slurm.wire.bulk import in_place
from monarch_slurm.wire.large_buffers import Buffer

UnpackError = (ValueError, TypeError, msgpack.UnpackException)
"""What `unpack` raises for bytes that `pack` did not make."""


def pack(value: Any) -> bytes:
    """Return ``value`` as bytes; tuples become lists."""
    packed: bytes = msgpack.packb(value)
    return packed


def unpack(data: Buffer) -> Any:
    """Return the value that `pack` was given.

    Raises:
        UnpackError: ``data`` is something else.
    """
    return msgpack.unpackb(in_place(data), strict_map_key=False)
