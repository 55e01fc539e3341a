"""`__supervise__` runs beside what its actor waits for, once at a time, until the actor is to stop."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from recorded_faults import Faults
from support import DEADLINE, wait_until

from monarch_slurm.actor import (
    Actor,
    Channel,
    FailureKind,
    MeshFailure,
    Port,
    ProcMesh,
    SupervisionError,
    context,
    current_rank,
    endpoint,
    this_host,
    this_proc,
)


class Child(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def fail(self) -> None:
        raise ValueError("on purpose")


class Owner(Actor):
    """Its endpoint `work` waits for what only `__supervise__` can bring."""

    def __init__(self, told: Port[Any], handles: bool = True) -> None:
        self.told, self.handles = told, handles
        self.repaired, self.receiver = Channel.open()
        self.gate, self.gate_receiver = Channel.open()
        self.running = 0

    @endpoint
    def gate_port(self) -> Port[Any]:
        return self.gate

    @endpoint
    def work(self) -> tuple[int, str]:
        procs = this_host().spawn_procs(name="inner")
        self.child: Any = procs.spawn("child", Child)
        os.kill(self.child.pid.call_one().get(), signal.SIGKILL)
        self.receiver.recv().get()
        return self.child.pid.call_one().get(), str(current_rank())

    @endpoint
    def lose(self, count: int) -> None:
        self.lost: Any = [this_proc().spawn("child", Child) for _ in range(count)]
        for child in self.lost:
            child.fail.broadcast()

    @endpoint
    def lose_and_wait_for_stop(self) -> None:
        child: Any = this_proc().spawn("child", Child)
        child.fail.broadcast()
        body: Any = context().actor_instance.body
        wait_until(lambda: body._control, "the failure is queued")
        self.told.send("queued")
        wait_until(lambda: body._stopping, "the stop")

    @endpoint
    def is_alive(self) -> bool:
        return True

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.running += 1
        self.told.send(("begins", self.running, str(context().message_rank)))
        if failure.kind is FailureKind.PROC_EXITED:
            self.child = this_host().spawn_procs(name="again").spawn("child", Child)
            self.child.pid.call_one().get()
            self.repaired.send(None)
        elif self.handles:
            self.gate_receiver.recv().get()
        self.running -= 1
        return self.handles


class AsyncOwner(Actor):
    def __init__(self, told: Port[Any], handles: bool = True) -> None:
        self.told, self.handles = told, handles
        self.repaired = asyncio.Event()
        self.gate, self.gate_receiver = Channel.open()
        self.running = 0

    @endpoint
    async def gate_port(self) -> Port[Any]:
        return self.gate

    @endpoint
    async def work(self) -> tuple[int, str]:
        procs = this_host().spawn_procs(name="inner")
        self.child: Any = procs.spawn("child", Child)
        os.kill(await self.child.pid.call_one(), signal.SIGKILL)
        await self.repaired.wait()
        return await self.child.pid.call_one(), str(current_rank())

    @endpoint
    async def lose(self, count: int) -> None:
        self.lost: Any = [this_proc().spawn("child", Child) for _ in range(count)]
        for child in self.lost:
            child.fail.broadcast()

    @endpoint
    async def lose_and_wait_for_stop(self) -> None:
        child: Any = this_proc().spawn("child", Child)
        child.fail.broadcast()
        body: Any = context().actor_instance.body
        wait_until(lambda: body._control, "the failure is queued")
        self.told.send("queued")
        wait_until(lambda: body._stopping, "the stop")

    @endpoint
    async def abort_and_wait(self) -> None:
        context().actor_instance.abort("enough")
        await asyncio.Event().wait()

    @endpoint
    async def is_alive(self) -> bool:
        return True

    async def __supervise__(self, failure: MeshFailure) -> bool:
        self.running += 1
        self.told.send(("begins", self.running, str(context().message_rank)))
        try:
            if failure.kind is FailureKind.PROC_EXITED:
                self.child = this_host().spawn_procs(name="again").spawn("child", Child)
                await self.child.pid.call_one()
                self.repaired.set()
            elif self.handles:
                await self.gate_receiver.recv()
        except asyncio.CancelledError:
            self.told.send("cancelled")
            raise
        self.running -= 1
        return self.handles


KINDS = pytest.mark.parametrize("kind", [Owner, AsyncOwner])


@KINDS
def test_an_owner_that_waits_is_repaired(grid: ProcMesh, kind: type[Any]) -> None:
    port, receiver = Channel.open()
    owners: Any = grid.spawn("owner", kind, port)
    pid, rank = owners.slice(x=1, y=slice(1, 2)).work.call_one().get(DEADLINE)
    assert pid > 0
    assert rank == "{'y': 0/1}", "an endpoint keeps its own rank"
    assert receiver.recv().get(DEADLINE) == ("begins", 1, "{'x': 1/2, 'y': 1/2}")
    owners.stop().get(DEADLINE)


@KINDS
def test_it_runs_once_at_a_time(grid: ProcMesh, kind: type[Any]) -> None:
    port, receiver = Channel.open()
    owner: Any = grid.slice(x=0, y=0).spawn("owner", kind, port)
    gate = owner.gate_port.call_one().get(DEADLINE)
    owner.lose.call_one(3).get(DEADLINE)
    for _ in range(3):
        assert receiver.recv().get(DEADLINE)[:2] == ("begins", 1)
        gate.send(None)
    owner.stop().get(DEADLINE)


def test_messages_are_handled_while_it_waits_and_a_stop_cancels_it(grid: ProcMesh) -> None:
    port, receiver = Channel.open()
    owner: Any = grid.slice(x=0, y=0).spawn("owner", AsyncOwner, port)
    owner.lose.call_one(1).get(DEADLINE)
    assert receiver.recv().get(DEADLINE)[0] == "begins"
    for _ in range(3):
        assert owner.is_alive.call_one().get(DEADLINE)
    owner.stop().get(DEADLINE)
    assert receiver.recv().get(DEADLINE) == "cancelled"


@KINDS
def test_a_failure_that_is_queued_when_a_stop_is_asked_for_is_not_supervised(grid: ProcMesh, kind: type[Any]) -> None:
    port, receiver = Channel.open()
    owner: Any = grid.slice(x=0, y=0).spawn("owner", kind, port, False)
    owner.lose_and_wait_for_stop.broadcast()
    assert receiver.recv().get(DEADLINE) == "queued"
    owner.stop("by the test").get(DEADLINE)
    assert "stopped: by the test" in str(owner.is_alive.call_one().exception(DEADLINE))
    port.send("last")
    assert receiver.recv().get(DEADLINE) == "last"


@KINDS
def test_a_failure_that_is_not_handled_ends_an_owner_that_waits(
    grid: ProcMesh, faults: Faults, kind: type[Any]
) -> None:
    port, _ = Channel.open()
    owner: Any = grid.slice(x=0, y=0).spawn("owner", Helpless if kind is Owner else AsyncHelpless, port)
    error = owner.wait.call_one().exception(DEADLINE)
    assert isinstance(error, SupervisionError), repr(error)
    assert faults.wait()[0].kind is FailureKind.CHILD_FAILED


class Helpless(Actor):
    def __init__(self, port: Port[Any]) -> None:
        self.receiver = Channel.open()[1]

    @endpoint
    def wait(self) -> None:
        self.child: Any = this_proc().spawn("child", Child)
        self.child.fail.broadcast()
        self.receiver.recv().get()


class AsyncHelpless(Actor):
    def __init__(self, port: Port[Any]) -> None:
        self.receiver = Channel.open()[1]

    @endpoint
    async def wait(self) -> None:
        self.child: Any = this_proc().spawn("child", Child)
        self.child.fail.broadcast()
        await self.receiver.recv()


def test_abort_ends_an_endpoint_that_awaits(grid: ProcMesh, faults: Faults) -> None:
    port, _ = Channel.open()
    owner: Any = grid.slice(x=0, y=0).spawn("owner", AsyncOwner, port)
    assert isinstance(owner.abort_and_wait.call_one().exception(DEADLINE), SupervisionError)
    assert faults.wait()[0].kind is FailureKind.ACTOR_ABORTED


def test_abort_does_not_wait_for_supervision(grid: ProcMesh, faults: Faults) -> None:
    port, receiver = Channel.open()
    owner: Any = grid.slice(x=0, y=0).spawn("owner", AsyncOwner, port)
    owner.lose.call_one(1).get(DEADLINE)
    assert receiver.recv().get(DEADLINE)[0] == "begins"
    owner.abort_and_wait.broadcast()
    assert faults.wait()[0].kind is FailureKind.ACTOR_ABORTED
    assert receiver.recv().get(DEADLINE) == "cancelled"
