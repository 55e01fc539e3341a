"""Buffers between real processes, over each way of transfer that every machine has."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from support import hold

from monarch_slurm.actor import SupervisionError
from monarch_slurm.config import configured
from monarch_slurm.rdma import BufferGoneError, PeerLostError, RDMAAction, RDMABuffer, RDMATimeoutError
from rdma.actors import digest, pattern

BACKENDS = ["process_vm", "shm", "tcp"]
SIZES = [1, 7, 4095, 65537, 1_000_003, 4 * 2**20, 64 * 2**20 + 13]

Spawn = Callable[[int, str], Any]


@pytest.fixture(autouse=True)
def unhandled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Killed procs are what these tests are about: the program goes on."""
    failures: list[Any] = []
    monkeypatch.setattr("monarch_slurm.actor.unhandled_fault_hook", failures.append)
    return failures


@pytest.mark.parametrize("backend", BACKENDS)
def test_bytes_arrive(spawn: Spawn, backend: str) -> None:
    holders = spawn(2, backend)
    owner, user = holders.slice(procs=0), holders.slice(procs=1)
    for index, size in enumerate(SIZES):
        buffer = owner.make.call_one(size, index, backend == "shm").get(60)
        assert user.read.call_one(buffer).get(60) == (digest(pattern(size, index)), backend)
        assert user.write.call_one(buffer, size, index + 100).get(60) == backend
        assert owner.digest_of.call_one(index).get(60) == digest(pattern(size, index + 100))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_short_write_leaves_the_rest(spawn: Spawn, backend: str) -> None:
    holders = spawn(2, backend)
    owner, user = holders.slice(procs=0), holders.slice(procs=1)
    buffer = owner.make.call_one(1000, 0, backend == "shm").get(60)
    user.write.call_one(buffer, 10, 1).get(60)
    assert owner.digest_of.call_one(0).get(60) == digest(pattern(10, 1) + pattern(1000, 0)[10:])


@pytest.mark.parametrize("backend", ["process_vm", "tcp"])
def test_many_buffers_are_one_action(spawn: Spawn, backend: str) -> None:
    holders = spawn(2, backend)
    sizes = [1 + 7919 * index % 60_000 for index in range(300)]
    buffers = holders.slice(procs=0).make_many.call_one(sizes).get(60)
    came = holders.slice(procs=1).add_up.call_one(buffers).get(60)
    assert came == [digest(pattern(size, index)) for index, size in enumerate(sizes)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_read_one(spawn: Spawn, backend: str) -> None:
    holders = spawn(4, backend)
    buffer = holders.slice(procs=0).make.call_one(3_000_001, 5, backend == "shm").get(60)
    came = holders.read.call(buffer).get(60)
    assert {digest_of for _, (digest_of, _) in came.items()} == {digest(pattern(3_000_001, 5))}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dropped_buffer_is_gone_for_all(spawn: Spawn, backend: str) -> None:
    holders = spawn(2, backend)
    owner, user = holders.slice(procs=0), holders.slice(procs=1)
    buffer = owner.make.call_one(1000, 1, backend == "shm").get(60)
    user.read.call_one(buffer).get(60)
    buffer.drop().get(20)
    kind, text = user.read_error.call_one(buffer).get(60)
    assert kind == "BufferGoneError"
    assert f"({backend}) buffer {buffer._target.slot} not found" in text
    with pytest.raises(BufferGoneError):
        buffer.drop().get(20)
    again = owner.make.call_one(1000, 2, backend == "shm").get(60)
    assert user.read.call_one(again).get(60)[0] == digest(pattern(1000, 2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_key_opens_nothing(spawn: Spawn, backend: str) -> None:
    holders = spawn(2, backend)
    buffer = holders.slice(procs=0).make.call_one(1000, 1, backend == "shm").get(60)
    buffer._target = buffer._target.__class__(*(*buffer._target_fields()[:1], 12345, *buffer._target_fields()[2:]))
    kind, text = holders.slice(procs=1).read_error.call_one(buffer).get(60)
    assert (kind, "not found" in text) == ("BufferGoneError", True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_owner_is_told(spawn: Spawn, backend: str) -> None:
    owners, users = spawn(1, backend), spawn(1, backend)
    buffer = owners.make.call_one(1000, 1, backend == "shm").get(60)
    users.read.call_one(buffer).get(60)
    os.kill(owners.pid.call_one().get(60), signal.SIGKILL)
    with pytest.raises(SupervisionError):
        owners.pid.call_one().get(60)
    kind, text = users.read_error.call_one(buffer).get(60)
    assert kind == "PeerLostError", text
    other = spawn(1, backend).make.call_one(1000, 2, backend == "shm").get(60)
    assert users.read.call_one(other).get(60)[0] == digest(pattern(1000, 2))


def test_a_buffer_whose_storage_was_freed_before_it_was_sent(spawn: Spawn) -> None:
    holders = spawn(2, "process_vm")
    buffer = holders.slice(procs=0).make_and_free.call_one(1000).get(60)
    assert holders.slice(procs=1).read_error.call_one(buffer).get(60)[0] == "BufferGoneError"
    buffer.drop().get(20)


def test_a_stopped_owner_runs_into_the_timeout(spawn: Spawn) -> None:
    owner, user = spawn(1, "tcp"), spawn(1, "tcp")
    buffer = owner.make.call_one(8 * 2**20, 1).get(60)
    user.read.call_one(buffer).get(60)
    pid = owner.pid.call_one().get(60)
    hold(pid)
    try:
        kind, text = user.read_error.call_one(buffer, 1).get(60)
        assert (kind, "timeout" in text) == ("RDMATimeoutError", True)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert user.read.call_one(buffer).get(60)[0] == digest(pattern(8 * 2**20, 1))


def test_the_client_takes_part(spawn: Spawn) -> None:
    owner = spawn(1, "process_vm")
    mine = RDMABuffer(memoryview(pattern(50_000, 4)))
    assert owner.read_on_a_plain_thread.call_one(mine).get(60) == digest(pattern(50_000, 4)), "its first use of buffers"
    target = memoryview(bytearray(50_000))
    owner.make.call_one(50_000, 3).get(60).read_into(target).get(60)
    assert target == pattern(50_000, 3)
    assert owner.read.call_one(mine).get(60)[0] == digest(pattern(50_000, 4))


@pytest.mark.parametrize("local", [False, True])
def test_no_time_is_too_little_for_any_transfer(spawn: Spawn, local: bool) -> None:
    content = pattern(1000, 1)
    buffer = RDMABuffer(memoryview(content)) if local else spawn(1, "process_vm").make.call_one(1000, 1).get(60)
    target = bytearray(1000)
    buffer.read_into(memoryview(target)).get(60)
    for late in (
        buffer.read_into(memoryview(bytearray(1000)), timeout=0),
        buffer.write_from(memoryview(bytearray(1000)), timeout=0),
        RDMAAction().read_remote(memoryview(bytearray(1000)), buffer).submit(timeout=0),
    ):
        with pytest.raises(RDMATimeoutError, match="a timeout of 0 s"):
            late.get(60)
    RDMAAction().submit(timeout=0).get(60)
    again = bytearray(1000)
    buffer.read_into(memoryview(again)).get(60)
    assert again == target == content


def test_an_owner_that_never_answers(spawn: Spawn) -> None:
    owner = spawn(1, "tcp")
    buffer = owner.make.call_one(1000, 1).get(60)
    pid = owner.pid.call_one().get(60)
    hold(pid)
    try:
        with pytest.raises(RDMATimeoutError, match="did not answer"):
            buffer.read_into(memoryview(bytearray(1000)), timeout=1).get(60)
    finally:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(PeerLostError):
        buffer.read_into(memoryview(bytearray(1000)), timeout=30).get(60)


def test_no_common_backend(spawn: Spawn) -> None:
    buffer = spawn(1, "tcp").make.call_one(10, 1).get(60)
    with configured(rdma_transports="process_vm"):
        error = buffer.read_into(memoryview(bytearray(10))).exception(60)
    assert "no compatible RDMA backend for buffer" in str(error)
