"""GPU memory between processes of one host, on the fake driver: what is mapped, found again, forgotten."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_libraries import compile_fake
from support import wait_until

from monarch_slurm.gpu import GpuMemory, libraries, sharing
from monarch_slurm.rdma.engine import Op, Target
from monarch_slurm.rdma.errors import BufferGoneError, NoDirectWayError
from monarch_slurm.rdma.gpu_ipc import GpuExports, GpuIpc
from monarch_slurm.rdma.memory import Memory, Stager, host_tensor
from monarch_slurm.rdma.registry import Entry, Registry
from monarch_slurm.rdma.samehost import SameHost
from monarch_slurm.rdma.workers import Workers
from rdma.actors import digest, pattern


def soon() -> float:
    return time.monotonic() + 30


class Mapped(torch.Tensor):
    """A tensor that keeps its mapping."""

    mapping: Any


def view(mapping: Any, size: int, _device: int) -> torch.Tensor:
    tensor = host_tensor(mapping.address, size).as_subclass(Mapped)  # the fake's memory is the host's
    tensor.mapping = mapping
    return tensor


class Owner:
    """Memory of a fake GPU in this process, and an engine that reaches it as a peer would."""

    def __init__(self, sizes: list[int]) -> None:
        parts = [GpuMemory.allocate(size) for size in sizes]
        fds = [part.export_fd() for part in parts]
        self.whole = sharing.map_exported(0, None, fds, [part.size_bytes for part in parts])
        for fd in fds:
            os.close(fd)
        self.bytes = host_tensor(self.whole.address, sum(part.size_bytes for part in parts))
        self.registry = Registry()
        self.exports = GpuExports(self.registry)
        self.asked = 0
        nonce = self.registry.nonce
        host = SameHost(os.getpid(), ctypes.addressof(nonce), bytes(nonce), self.registry.lock_fd)
        self.engine = GpuIpc(host, os.getpid(), self.ask, Workers().run, view)

    def ask(self, kind: str, fields: dict[str, Any], _deadline: float) -> dict[str, Any]:
        assert kind == "gpu_export"
        self.asked += 1
        return self.exports.send("the peer", fields)

    def buffer(self, start: int, nbytes: int) -> Entry:
        part = self.bytes[start : start + nbytes]
        return self.registry.add(Memory(0, nbytes, False, part, None, Stager(part)))

    def drop(self, entry: Entry) -> dict[Any, list[int]]:
        return self.exports.drop(self.registry.drop(entry.slot, entry.key, soon()))


def op(entry: Entry, local: torch.Tensor, write: bool = False) -> Op:
    target = Target(entry.slot, entry.key, entry.slot_address, 0, entry.memory.nbytes)
    return Op(write, 0, len(local), target, None, Stager(local))


@pytest.fixture
def fake(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path_factory.getbasetemp() / "fake_gpu"  # compiled once
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("MONARCH_SLURM_GPU_PLATFORM", "cuda")
    monkeypatch.setenv("MONARCH_SLURM_GPU_LIBRARY", str(compile_fake("fake_gpu", "cuda", folder)))
    libraries.gpu_runtime.cache_clear()
    yield
    libraries.gpu_runtime.cache_clear()


@pytest.mark.usefixtures("fake")
def test_a_buffer_over_three_allocations() -> None:
    owner = Owner([2 << 20, 4 << 20, 2 << 20])
    entry = owner.buffer((2 << 20) - 5, (4 << 20) + 10)
    data = torch.frombuffer(pattern((4 << 20) + 10, 1), dtype=torch.uint8)
    owner.engine.transfer([op(entry, data, write=True)], soon())
    assert torch.equal(owner.bytes[(2 << 20) - 5 :][: len(data)], data)
    target = torch.zeros_like(data)
    owner.engine.transfer([op(entry, target)], soon())
    assert torch.equal(target, data)
    owner.engine.transfer([op(entry, torch.full((7,), 9, dtype=torch.uint8), write=True)], soon())
    assert owner.bytes[(2 << 20) - 5 :][:8].tolist() == [9] * 7 + [int(data[7])]
    assert owner.asked == 1, "what is mapped is not asked for again"


@pytest.mark.usefixtures("fake")
def test_what_is_mapped_is_copied_without_a_thread() -> None:
    owner = Owner([2 << 20])
    entry = owner.buffer(5, 1000)
    data = torch.frombuffer(pattern(1000, 1), dtype=torch.uint8)
    assert owner.engine.begin([op(entry, data, write=True)]) is None, "the owner has to be asked first"
    owner.engine.transfer([op(entry, data, write=True)], soon())
    target = torch.zeros_like(data)
    begun = owner.engine.begin([op(entry, target)])
    assert begun is not None
    assert owner.engine.begin([op(entry, target)]) is None, "one batch at a time"
    dropped = threading.Thread(target=owner.drop, args=(entry,))
    dropped.start()
    wait_until(lambda: entry.dropped)
    assert dropped.is_alive(), "a drop waits for those who copy"
    begun.finish()
    assert torch.equal(target, data)
    dropped.join(30)
    assert not dropped.is_alive()
    with pytest.raises(BufferGoneError):
        owner.engine.begin([op(entry, target)])
    begun.finish()  # the thread that was started for it comes late
    owner.engine.transfer([op(owner.buffer(0, 10), target[:10])], soon())


@pytest.mark.usefixtures("fake")
def test_what_is_dropped_is_unmapped_once_nobody_needs_it() -> None:
    owner = Owner([2 << 20])
    first, second = owner.buffer(0, 1000), owner.buffer(1000, 1000)
    target = torch.zeros(1000, dtype=torch.uint8)
    before = len(os.listdir("/proc/self/fd"))
    owner.engine.transfer([op(first, target), op(second, target)], soon())
    assert len(os.listdir("/proc/self/fd")) == before + 1, "one allocation is mapped once"
    assert owner.drop(first) == {}
    with pytest.raises(BufferGoneError):
        owner.engine.transfer([op(first, target)], soon())
    owner.engine.transfer([op(second, target)], soon())
    forget = owner.drop(second)
    assert list(forget) == ["the peer"]
    owner.engine.forget(forget["the peer"])
    assert len(os.listdir("/proc/self/fd")) == before
    third = owner.buffer(0, 10)
    owner.engine.transfer([op(third, target[:10])], soon())
    assert owner.drop(third) != forget, "the same allocation has another number"


@pytest.mark.usefixtures("fake")
def test_memory_that_the_driver_does_not_give_away() -> None:
    owner = Owner([2 << 20])
    ours = torch.zeros(100, dtype=torch.uint8)
    entry = owner.registry.add(Memory(0, 100, False, ours, None, Stager(ours)))
    with pytest.raises(NoDirectWayError, match=r"cannot give the memory .* away: cuda: MemGetAddressRange failed"):
        owner.engine.transfer([op(entry, ours)], soon())


def test_without_a_way_to_map_it_bounces(spawn: Callable[..., Any]) -> None:
    """Memory that stands for a GPU's, on a machine without any: it goes through host memory, by TCP."""
    holders = spawn(2, "tcp", "gpu_ipc,process_vm,tcp")
    owner, user = holders.slice(procs=0), holders.slice(procs=1)
    nbytes = 10_000_001
    buffer = owner.make_device.call_one(nbytes, 3).get(60)
    assert user.read.call_one(buffer).get(60) == (digest(pattern(nbytes, 3)), "tcp")
    assert user.read_to_device.call_one(buffer).get(60) == (digest(pattern(nbytes, 3)), "tcp")
    assert user.write.call_one(buffer, nbytes, 4).get(60) == "tcp"
    assert owner.digest_of.call_one(0).get(60) == digest(pattern(nbytes, 4))
    assert owner.read_to_device.call_one(buffer).get(60) == (digest(pattern(nbytes, 4)), "local")
    assert owner.read.call_one(buffer).get(60) == (digest(pattern(nbytes, 4)), "local")
    buffer.drop().get(20)
    assert user.read_error.call_one(buffer).get(60)[0] == "BufferGoneError"
