"""Copies within a host, by themselves: which slots are locked, which memory is mapped."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from monarch_slurm.rdma import shared_memory
from monarch_slurm.rdma.engine import Op, Target
from monarch_slurm.rdma.errors import BufferGoneError, RDMATimeoutError
from monarch_slurm.rdma.memory import memory_of
from monarch_slurm.rdma.registry import Entry, Registry
from monarch_slurm.rdma.samehost import SameHost, SharedMemory
from rdma.actors import digest, pattern


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def peer_of(registry: Registry) -> SameHost:
    """Return what a peer would have: its locks are those of another open file."""
    nonce = registry.nonce
    return SameHost(os.getpid(), ctypes.addressof(nonce), bytes(nonce), registry.lock_fd)


def read(entry: Entry, nbytes: int = 8) -> Op:
    target = Target(entry.slot, entry.key, entry.slot_address, entry.memory.address, entry.memory.nbytes)
    local = memory_of(memoryview(bytearray(nbytes)))
    return Op(False, local.address, nbytes, target, local)


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def entries(registry: Registry) -> list[Entry]:
    return [registry.add(memory_of(memoryview(bytearray(8)))) for _ in range(5)]


@pytest.fixture
def peer(registry: Registry) -> Iterator[SameHost]:
    peer = peer_of(registry)
    yield peer
    peer.close()


def test_a_drop_waits_for_no_other_buffer(registry: Registry, entries: list[Entry], peer: SameHost) -> None:
    with peer.holding([read(entries[index]) for index in (4, 0, 2, 2)], soon()):
        for index in (1, 3):
            registry.drop(entries[index].slot, entries[index].key, soon())
        with pytest.raises(RDMATimeoutError, match="still in use by another process"):
            registry.drop(entries[2].slot, entries[2].key, soon(0))


def test_a_drop_that_has_failed_may_be_tried_again(registry: Registry, entries: list[Entry], peer: SameHost) -> None:
    entry = entries[0]
    with peer.holding([read(entry)], soon()), pytest.raises(RDMATimeoutError):
        registry.drop(entry.slot, entry.key, soon(0))
    with registry_user(registry, entries[1]), pytest.raises(RDMATimeoutError):
        registry.drop(entries[1].slot, entries[1].key, soon(0))
    for again in entries[:2]:
        with pytest.raises(BufferGoneError):
            peer.transfer([read(again)], soon())
        registry.drop(again.slot, again.key, soon())
        with pytest.raises(BufferGoneError):
            registry.drop(again.slot, again.key, soon())
    assert len(registry) == 3


def registry_user(registry: Registry, entry: Entry) -> ExitStack:
    stack = ExitStack()
    stack.enter_context(registry.using(entry))
    return stack


def test_batches_do_not_wait_for_each_other(registry: Registry, entries: list[Entry], peer: SameHost) -> None:
    """A small one is not behind a large one, and each keeps its locks when another ends."""
    with peer.holding([read(entries[0]), read(entries[1])], soon()):
        with peer.holding([read(entries[1]), read(entries[2])], soon(0)):
            pass
        peer.transfer([read(entries[1])], soon(5))
        with pytest.raises(RDMATimeoutError):
            registry.drop(entries[1].slot, entries[1].key, soon(0))
        registry.drop(entries[2].slot, entries[2].key, soon())
    registry.drop(entries[1].slot, entries[1].key, soon())


@pytest.mark.parametrize("shared", [False, True])
def test_a_copy_that_begins_within_the_buffer(registry: Registry, peer: SameHost, shared: bool) -> None:
    view = shared_memory(5000) if shared else memoryview(bytearray(5000))
    view[:] = pattern(5000, 1)
    entry, local = registry.add(memory_of(view)), bytearray(100)
    at = entry.memory.address
    target = Target(entry.slot, entry.key, entry.slot_address, at, 5000, SharedMemory.find(at, 5000))
    op = Op(False, memory_of(memoryview(local)).address, 100, target, local, None, 4321)
    (peer.transfer_mapped if shared else peer.transfer)([op], soon())
    assert local == pattern(5000, 1)[4321:4421]


def test_many_batches_and_drops_at_once(registry: Registry, peer: SameHost) -> None:
    many = [registry.add(memory_of(memoryview(bytearray(8)))) for _ in range(200)]
    faults: list[BaseException] = []

    def loop(start: int) -> None:
        try:
            for round_number in range(50):
                peer.transfer([read(many[(start + round_number + step) % 100]) for step in (0, 7, 8, 9, 50)], soon())
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=loop, args=(start,)) for start in (0, 25, 50, 75)]
    for thread in threads:
        thread.start()
    for entry in many[100:]:
        registry.drop(entry.slot, entry.key, soon())
    for thread in threads:
        thread.join(60)
    assert faults == []
    for entry in many[:100]:
        registry.drop(entry.slot, entry.key, soon(0.01))
    assert peer._slots._held == {}


def test_shared_memory_stays_where_it_can_be_named(spawn: Callable[..., Any]) -> None:
    """Else other memory comes to lie at its address, and peers map the file that is no more behind it."""
    size = 8 << 20
    view = shared_memory(size)
    address = memory_of(view).address
    del view
    gc.collect()
    others = [torch.full((size,), 7, dtype=torch.uint8) for _ in range(5)]
    assert [SharedMemory.find(other.data_ptr(), size) for other in others] == [None] * 5
    assert SharedMemory.find(address, size) is not None
    holders = spawn(2, "shm")
    owner, user = holders.slice(procs=0), holders.slice(procs=1)
    buffer = owner.make_after_one_is_forgotten.call_one(size, 3).get(60)
    assert user.read.call_one(buffer).get(60)[0] == digest(pattern(size, 3))
