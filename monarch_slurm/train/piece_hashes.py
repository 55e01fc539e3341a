"""Hashes of memory in pieces of a fixed size, which a few threads work out side by side.

hashlib releases the interpreter while it hashes, so that threads of one process share the work and hold nobody up.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

PIECE_BYTES = 2**20
"""Each piece has this many bytes, but the last one of a buffer: one takes about a millisecond to hash."""

_SMALL_BYTES = 2**16
"""Below this, hashing takes no longer than handing the piece to another thread."""

_MAX_THREADS = 4


def pieces(data: memoryview) -> Iterator[memoryview]:
    """Yield ``data`` piece by piece."""
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]


class PieceHasher:
    """Threads that hash pieces, as many as the process has cores and at most four; they end with the ``with`` block."""

    def __init__(self) -> None:
        self._threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="hash_piece")

    def __enter__(self) -> PieceHasher:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def start(self, piece: memoryview) -> Future[bytes]:
        """Return what will be the sha256 of a piece, whose memory must not change until then."""
        if len(piece) > _SMALL_BYTES:
            return self._pool.submit(_sha256, piece)
        known: Future[bytes] = Future()
        known.set_result(_sha256(piece))
        return known

    def hash(self, data: memoryview) -> bytes:
        """Return the sha256 of each piece of ``data``, one behind the other."""
        if self._threads == 1 or len(data) <= PIECE_BYTES:
            return b"".join(map(_sha256, pieces(data)))
        return b"".join(self._pool.map(_sha256, pieces(data)))


def _sha256(piece: memoryview) -> bytes:
    return hashlib.sha256(piece).digest()
