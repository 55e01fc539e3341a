"""Local memory of a device brought to host memory and back, for transfers that take host memory only.

It goes in rounds through two pieces of page-locked memory: while the bytes of one round travel, those of another are
copied from or to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from monarch_slurm.rdma.engine import Op
from monarch_slurm.rdma.memory import Memory, Stager, host_bytes

_ROUND_BYTES = 16 * 2**20

_pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="rdma-bounce")

Transfer = Callable[[Sequence[Op]], None]


class _Piece(NamedTuple):
    """Part of an op: where it begins there, how many bytes, and where it lies in the round's host memory."""

    op: Op
    stager: Stager
    start: int
    nbytes: int
    place: int

    def hosted(self, memory: Memory) -> Op:
        address, offset = memory.address + self.place, self.op.offset + self.start
        return Op(self.op.write, address, self.nbytes, self.op.target, memory.anchor, None, offset)

    def to_host(self, memory: Memory) -> None:
        self.stager.to_host(self.start, memory.address + self.place, self.nbytes)

    def to_device(self, memory: Memory) -> None:
        self.stager.from_host(self.start, memory.address + self.place, self.nbytes)


def bounced(ops: Sequence[Op], transfer: Transfer) -> None:
    """Have ``transfer`` do ``ops`` with local memory of the host only; what they read is on its device at the end."""
    plain = [op for op in ops if op.stager is None]
    if plain:
        transfer(plain)
    for write in (True, False):
        rounds = list(_rounds([op for op in ops if op.stager is not None and op.write is write]))
        if rounds:
            (_write if write else _read)(rounds, _host_memory(rounds), transfer)


def _rounds(ops: Sequence[Op]) -> Iterator[list[_Piece]]:
    pieces: list[_Piece] = []
    place = 0
    for op in ops:
        assert op.stager is not None
        start = 0
        while start < op.nbytes:
            if place == _ROUND_BYTES:
                yield pieces
                pieces, place = [], 0
            size = min(op.nbytes - start, _ROUND_BYTES - place)
            pieces.append(_Piece(op, op.stager, start, size, place))
            start, place = start + size, place + size
    if pieces:
        yield pieces


def _host_memory(rounds: list[list[_Piece]]) -> list[Memory]:
    near = rounds[0][0].stager
    return [host_bytes(sum(piece.nbytes for piece in pieces), near) for pieces in rounds[:2]]


def _read(rounds: list[list[_Piece]], memory: list[Memory], transfer: Transfer) -> None:
    emptied: list[Future[None]] = []
    try:
        for index, pieces in enumerate(rounds):
            mine = memory[index % 2]
            if index > 1:
                emptied[index - 2].result()
            transfer([piece.hosted(mine) for piece in pieces])
            emptied.append(_pool.submit(_each, _Piece.to_device, pieces, mine))
    finally:
        errors = [error for future in emptied if (error := future.exception()) is not None]
    if errors:
        raise errors[0]


def _write(rounds: list[list[_Piece]], memory: list[Memory], transfer: Transfer) -> None:
    _each(_Piece.to_host, rounds[0], memory[0])
    for index, pieces in enumerate(rounds):
        filled: Future[None] | None = None
        if index + 1 < len(rounds):
            filled = _pool.submit(_each, _Piece.to_host, rounds[index + 1], memory[(index + 1) % 2])
        try:
            transfer([piece.hosted(memory[index % 2]) for piece in pieces])
        finally:
            error = None if filled is None else filled.exception()
        if error is not None:
            raise error


def _each(move: Callable[[_Piece, Memory], None], pieces: list[_Piece], memory: Memory) -> None:
    for piece in pieces:
        move(piece, memory)
