"""What a process holds of an owner that has ended: given back, but not while it is used."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import wait_until

from monarch_slurm.config import configured, revision
from monarch_slurm.rdma import PeerLostError, RDMABuffer
from monarch_slurm.rdma.manager import manager
from monarch_slurm.rdma.peer import Peer
from monarch_slurm.rdma.tcp_client import TcpEngine
from rdma.actors import pattern
from rdma.test_gpu_ipc import Owner, fake, op

Spawn = Callable[[int, str], Any]
assert fake  # a fixture


@pytest.fixture(autouse=True)
def unhandled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch_slurm.actor.unhandled_fault_hook", lambda failure: None)


def read(buffer: RDMABuffer) -> bytes:
    target = bytearray(buffer.size())
    buffer.read_into(memoryview(target)).get(60)
    return bytes(target)


def mapped_files() -> int:
    """How many files of others' buffers are mapped or open here."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:monarch_slurm.rdma" in line for line in maps)


def connections(peer: Peer) -> list[Any]:
    engine = peer._engines["tcp"]
    assert isinstance(engine, TcpEngine)
    return [stream._socket for stream in engine._lanes.all if stream._socket is not None]


def test_a_file_of_a_dead_owner_is_unmapped(spawn: Spawn) -> None:
    with configured(rdma_transports="shm,process_vm,local"):
        owner, other = spawn(1, "shm"), spawn(1, "shm")
        theirs = other.make.call_one(1000, 1, True).get(60)
        assert read(theirs) == pattern(1000, 1)
        before = mapped_files()
        buffer = owner.make.call_one(100_000, 2, True).get(60)
        assert read(buffer) == pattern(100_000, 2)
        peer = manager()._peer(buffer._home)
        with peer.in_use():
            kill(owner, peer)
            peer._give_back()
            assert mapped_files() == before + 1, "nothing is taken from under a transfer"
        wait_until(lambda: mapped_files() == before)
        with pytest.raises(PeerLostError):
            read(buffer)
        assert read(theirs) == pattern(1000, 1), "what is held of others stays"


def test_connections_to_a_dead_owner_are_closed(spawn: Spawn) -> None:
    with configured(rdma_transports="tcp,local"):
        owner = spawn(1, "tcp")
        buffer = owner.make.call_one(100_000, 2).get(60)
        assert read(buffer) == pattern(100_000, 2)
        peer = manager()._peer(buffer._home)
        (connection,) = connections(peer)
        with peer.in_use():
            kill(owner, peer)
            assert connection.fileno() >= 0
        wait_until(lambda: connection.fileno() == -1)


def kill(owner: Any, peer: Peer) -> None:
    os.kill(owner.pid.call_one().get(60), signal.SIGKILL)
    wait_until(lambda: peer._lost)


@pytest.mark.usefixtures("fake")
def test_gpu_memory_of_a_dead_owner_is_unmapped_after_the_last_copy(spawn: Spawn) -> None:
    buffer = spawn(1, "process_vm").make.call_one(1000, 1).get(60)
    here, owner = manager(), Owner([2 << 20])
    peer: Peer = here._peer(buffer._home)
    peer._engines["gpu_ipc"] = owner.engine
    entry = owner.buffer(0, 1000)
    local = torch.zeros(1000, dtype=torch.uint8)
    owner.engine.transfer([op(entry, local)], time.monotonic() + 30)
    peer._chosen[False, False] = revision(), owner.engine
    begun = []

    def begin() -> None:
        begun.append(here.begin(buffer._home, False, False, [op(entry, local)]))

    thread = threading.Thread(target=begin)  # never on the main one
    thread.start()
    thread.join(30)
    peer.gone("killed")
    peer._give_back()
    assert len(owner.engine._mapped) == 1
    assert begun[0] is not None
    begun[0].finish()
    wait_until(lambda: owner.engine._mapped == {})
