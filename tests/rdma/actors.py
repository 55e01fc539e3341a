"""Actors that own and transfer buffers, for the tests. Needs no torch."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from monarch_slurm.actor import Actor, endpoint
from monarch_slurm.rdma import RDMAAction, RDMABuffer, RDMAError, buffer, memory, recent_transfers, shared_memory
from monarch_slurm.rdma.engine import Op
from monarch_slurm.rdma.manager import manager


def pattern(nbytes: int, seed: int) -> bytearray:
    """Return bytes that differ from seed to seed and from place to place."""
    block = random.Random(seed).randbytes(min(nbytes, 65521))
    return bytearray((block * (nbytes // len(block) + 1))[:nbytes])


def digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class Device(NamedTuple):
    type: str = "cpu"
    index: int | None = None


class StandIn:
    """A `Stager` of host memory, without torch; stands for its flat tensor, too."""

    device = Device()

    def __init__(self, data: memoryview) -> None:
        self.bytes = self
        self._data = data

    def data_ptr(self) -> int:
        return memory.memory_of(self._data).address

    def get_device(self) -> int:
        return -1

    def pinned(self, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def to_host(self, offset: int, address: int, nbytes: int) -> None:
        memory.view_of(address, nbytes)[:] = self._data[offset : offset + nbytes]

    def from_host(self, offset: int, address: int, nbytes: int) -> None:
        self._data[offset : offset + nbytes] = memory.view_of(address, nbytes)

    def copy(self, other: StandIn, nbytes: int) -> None:
        self._data[:nbytes] = other._data[:nbytes]


@contextlib.contextmanager
def as_if_on_a_device() -> Iterator[None]:
    """Let memory be taken for a device's: reached by copies only."""

    def stand_in(data: memoryview) -> memory.Memory:
        made: Any = StandIn(data)
        return memory.Memory(made.data_ptr(), len(data), False, data, None, made)

    buffer.memory_of = stand_in
    try:
        yield
    finally:
        buffer.memory_of = memory.memory_of


class Holder(Actor):
    """Owns memory, and reads and writes that of others."""

    def __init__(self) -> None:
        self.memory: list[memoryview] = []

    @endpoint
    def make(self, nbytes: int, seed: int, shared: bool = False) -> RDMABuffer:
        view = shared_memory(nbytes) if shared else memoryview(bytearray(nbytes))
        view[:] = pattern(nbytes, seed)
        self.memory.append(view)
        return RDMABuffer(view)

    @endpoint
    def make_and_free(self, nbytes: int) -> RDMABuffer:
        """Return a buffer of a tensor whose storage is freed in place, as FSDP does."""
        import torch

        self.tensor = torch.ones(nbytes, dtype=torch.uint8)
        buffer = RDMABuffer(self.tensor)
        self.tensor.untyped_storage().resize_(0)
        return buffer

    @endpoint
    def make_after_one_is_forgotten(self, nbytes: int, seed: int) -> RDMABuffer:
        shared_memory(nbytes)[:3] = b"old"
        view = memoryview(pattern(nbytes, seed))
        self.memory.append(view)
        return RDMABuffer(view)

    @endpoint
    def make_device(self, nbytes: int, seed: int) -> RDMABuffer:
        view = memoryview(pattern(nbytes, seed))
        self.memory.append(view)
        with as_if_on_a_device():
            return RDMABuffer(view)

    @endpoint
    def read_to_device(self, buffer: RDMABuffer) -> tuple[str, str]:
        target = bytearray(buffer.size())
        with as_if_on_a_device():
            buffer.read_into(memoryview(target)).get(120)
        return digest(target), recent_transfers()[-1].backend

    @endpoint
    def make_many(self, sizes: list[int]) -> list[RDMABuffer]:
        views = [memoryview(pattern(size, index)) for index, size in enumerate(sizes)]
        self.memory += views
        return [RDMABuffer(view) for view in views]

    @endpoint
    def digest_of(self, index: int) -> str:
        return digest(self.memory[index])

    @endpoint
    def read(self, buffer: RDMABuffer, timeout: int = 60) -> tuple[str, str]:
        """Return the digest of what was read, and by which backend."""
        target = bytearray(buffer.size())
        buffer.read_into(memoryview(target), timeout=timeout).get(120)
        return digest(target), recent_transfers()[-1].backend

    @endpoint
    def read_on_a_plain_thread(self, buffer: RDMABuffer) -> str:
        target = bytearray(buffer.size())
        thread = threading.Thread(target=lambda: buffer.read_into(memoryview(target)).get(60))
        thread.start()
        thread.join(60)
        return digest(target)

    @endpoint
    def write(self, buffer: RDMABuffer, nbytes: int, seed: int, timeout: int = 60) -> str:
        buffer.write_from(memoryview(pattern(nbytes, seed)), timeout=timeout).get(120)
        return recent_transfers()[-1].backend

    @endpoint
    def read_error(self, buffer: RDMABuffer, timeout: int = 60) -> tuple[str, str]:
        """Return class and text of the error that a read ends with."""
        error = buffer.read_into(memoryview(bytearray(buffer.size())), timeout=timeout).exception(120)
        return type(error).__name__, str(error)

    @endpoint
    def spoil_key(self, buffer: RDMABuffer) -> None:
        """Have the next read of the buffer by ibverbs use a key that is none."""
        engine: Any = manager()._peer(buffer._home)._engines["ibverbs"]
        key, rkey = engine._rkeys[buffer._target.slot]
        engine._rkeys[buffer._target.slot] = key, rkey ^ 0x5A5A00

    @endpoint
    def be_deaf(self, buffer: RDMABuffer) -> None:
        """Keep the queue pairs to the buffer's owner, and do not hear of its end."""
        peer = manager()._peer(buffer._home)
        peer.enter()
        engine: Any = peer._engines["ibverbs"]
        engine.lost = lambda reason: None

    @endpoint
    def read_by_queue_pair(self, buffer: RDMABuffer) -> tuple[str, str]:
        """Read as if nothing were known of the owner; return class and text of the error."""
        local = memory.memory_of(memoryview(bytearray(buffer.size())))
        read = Op(False, local.address, buffer.size(), buffer._target, local)
        engine: Any = manager()._peer(buffer._home)._engines["ibverbs"]
        try:
            engine.transfer([read], time.monotonic() + 120)
        except RDMAError as error:
            return type(error).__name__, str(error)
        return "", ""

    @endpoint
    def add_up(self, buffers: list[RDMABuffer]) -> list[str]:
        targets = [bytearray(buffer.size()) for buffer in buffers]
        action = RDMAAction()
        for target, source in zip(targets, buffers, strict=True):
            action.read_remote(memoryview(target), source)
        action.submit().get(120)
        return [digest(target) for target in targets]

    @endpoint
    def pid(self) -> int:
        return os.getpid()
