"""Memory of a device by way of the host's, in rounds through two pieces of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from monarch_slurm.rdma import bounce, memory
from monarch_slurm.rdma.bounce import bounced
from monarch_slurm.rdma.engine import Op, Target
from monarch_slurm.rdma.errors import PeerLostError
from monarch_slurm.rdma.memory import memory_of, view_of
from rdma.actors import StandIn, pattern

SIZES = [1, 999, 1000, 1001, 5555, 20]


@pytest.fixture(autouse=True)
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounce, "_ROUND_BYTES", 1000)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the pieces of host memory that are made."""
    sizes: list[int] = []
    make = bounce.host_bytes

    def host_bytes(nbytes: int, near: Any) -> memory.Memory:
        sizes.append(nbytes)
        return make(nbytes, near)

    monkeypatch.setattr(bounce, "host_bytes", host_bytes)
    return sizes


class Remote:
    """Buffers by slot, and how an engine copies from and to them."""

    def __init__(self, buffers: list[bytearray]) -> None:
        self.buffers = buffers
        self.rounds: list[int] = []

    def transfer(self, ops: Sequence[Op]) -> None:
        self.rounds.append(sum(op.nbytes for op in ops))
        for op in ops:
            assert op.stager is None
            there = memoryview(self.buffers[op.target.slot])[op.offset : op.offset + op.nbytes]
            here = view_of(op.address, op.nbytes)
            if op.write:
                there[:] = here
            else:
                here[:] = there


def op(write: bool, slot: int, local: bytearray, on_device: bool = True) -> Op:
    view = memoryview(local)
    stager: Any = StandIn(view) if on_device else None
    return Op(write, memory_of(view).address, len(local), Target(slot, 1, 0, 0, len(local)), None, stager)


def test_reads_and_writes_of_all_sizes(taken: list[int]) -> None:
    sources = [pattern(size, index) for index, size in enumerate(SIZES)]
    targets = [bytearray(size) for size in SIZES]
    reading = Remote(sources)
    bounced([op(False, slot, target) for slot, target in enumerate(targets)], reading.transfer)
    assert targets == sources
    assert reading.rounds == [1000] * 8 + [576]
    assert taken == [1000, 1000], "two pieces, however much there is"
    writing = Remote([bytearray(size) for size in SIZES])
    bounced([op(True, slot, source) for slot, source in enumerate(sources)], writing.transfer)
    assert writing.buffers == sources
    assert taken == [1000] * 4


def test_little_takes_little_and_host_memory_none(taken: list[int]) -> None:
    source, target, plain = pattern(300, 1), bytearray(300), bytearray(5000)
    remote = Remote([pattern(300, 2), bytearray(300), pattern(5000, 3)])
    bounced([op(False, 0, target), op(True, 1, source), op(False, 2, plain, on_device=False)], remote.transfer)
    assert (target, remote.buffers[1], plain) == (pattern(300, 2), source, pattern(5000, 3))
    assert taken == [300, 300]
    assert remote.rounds == [5000, 300, 300]


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("last", [1, 3])
def test_a_failure_ends_it_when_nothing_touches_the_memory_any_more(write: bool, last: int) -> None:
    local, remote = pattern(9000, 1), Remote([pattern(9000, 2)])

    def transfer(ops: Sequence[Op]) -> None:
        if len(remote.rounds) == last:
            raise PeerLostError("gone")
        remote.transfer(ops)

    with pytest.raises(PeerLostError):
        bounced([op(write, 0, local)], transfer)
    ours, theirs = (remote.buffers[0], local) if write else (local, remote.buffers[0])
    assert ours[: 1000 * last] == theirs[: 1000 * last]


def test_a_fault_of_the_device_is_told() -> None:
    class Broken(StandIn):
        def from_host(self, offset: int, address: int, nbytes: int) -> None:
            raise RuntimeError("the device is gone")

        def to_host(self, offset: int, address: int, nbytes: int) -> None:
            if offset:
                raise RuntimeError("the device is gone")

    remote, local = Remote([bytearray(3000)]), memoryview(bytearray(3000))
    for write in (False, True):
        broken: Any = Broken(local)
        with pytest.raises(RuntimeError, match="the device is gone"):
            bounced([Op(write, 0, 3000, Target(0, 1, 0, 0, 3000), None, broken)], remote.transfer)
