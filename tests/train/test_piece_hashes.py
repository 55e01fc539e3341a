"""Pieces and their hashes, whoever works them out."""

from __future__ import annotations

import hashlib
import os

import pytest

from monarch_slurm.train.piece_hashes import PIECE_BYTES, PieceHasher, pieces


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
@pytest.mark.parametrize("cores", [1, 8])
def test_threads_and_the_caller_find_the_same(monkeypatch: pytest.MonkeyPatch, size: int, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    data = os.urandom(size)
    expected = [hashlib.sha256(data[i : i + PIECE_BYTES]).digest() for i in range(0, size, PIECE_BYTES)]
    with PieceHasher() as hasher:
        assert hasher.hash(memoryview(data)) == b"".join(expected)
        assert [hasher.start(piece).result() for piece in pieces(memoryview(data))] == expected
