"""Every stop ends: whatever an actor does that does not end, it is interrupted in time, or given up."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from recorded_faults import Faults
from sample_actors import Log
from support import DEADLINE, wait_gone, wait_until

from monarch_slurm.actor import (
    Actor,
    Channel,
    FailureKind,
    MeshFailure,
    Port,
    ProcMesh,
    SupervisionError,
    concurrent_endpoint,
    context,
    endpoint,
    this_host,
    this_proc,
)
from monarch_slurm.config import configure, configured


@pytest.fixture
def hasty() -> Iterator[None]:
    with configured(stop_actor_timeout=0.5, cleanup_timeout=0.3):
        yield


@pytest.fixture(scope="module")
def shared() -> Iterator[ProcMesh]:
    with configured(cleanup_timeout=0.3):
        mesh = this_host().spawn_procs(name="shared")
    yield mesh
    mesh.stop().get(DEADLINE)


def block(how: str) -> None:
    if how == "event":
        threading.Event().wait()
    elif how == "get":
        Channel.open()[1].recv().get()
    elif how == "busy":
        while True:
            pass
    elif how == "get that is tried again":
        receiver = Channel.open()[1]
        while True:
            try:
                receiver.recv().get()
            except BaseException:
                time.sleep(0.01)
    elif how == "native code":
        ctypes.PyDLL(None).pause()


class Stuck(Actor):
    def __init__(self, port: Port[str], where: str, how: str) -> None:
        self.port, self.where, self.how = port, where, how
        self.reach("__init__")

    def reach(self, where: str) -> None:
        if where == self.where:
            self.port.send(where)
            block(self.how)

    @endpoint
    def work(self) -> None:
        self.reach("endpoint")

    @endpoint
    def lose_child(self) -> None:
        self.child: Any = this_proc().spawn("child", Log)
        self.child.fail.broadcast()

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.reach("__supervise__")
        return True

    def __cleanup__(self, error: Exception | None) -> None:
        self.reach("__cleanup__")


async def block_async(how: str) -> None:
    if how == "await":
        await asyncio.Event().wait()
    elif how == "swallow":
        while True:
            try:
                await asyncio.Event().wait()
            except BaseException:
                await asyncio.sleep(0)
    else:
        block(how)


class AsyncStuck(Actor):
    def __init__(self, port: Port[str], where: str, how: str) -> None:
        self.port, self.where, self.how = port, where, how
        if where == "__init__":
            port.send(where)
            block(how)

    async def reach(self, where: str) -> None:
        if where == self.where:
            self.port.send(where)
            await block_async(self.how)

    @endpoint
    async def work(self) -> None:
        await self.reach("endpoint")

    @concurrent_endpoint
    async def work_beside(self) -> None:
        await self.reach("concurrent endpoint")

    @endpoint
    async def lose_child(self) -> None:
        self.child: Any = this_proc().spawn("child", Log)
        self.child.fail.broadcast()

    async def __supervise__(self, failure: MeshFailure) -> bool:
        await self.reach("__supervise__")
        return True

    async def __cleanup__(self, error: Exception | None) -> None:
        await self.reach("__cleanup__")


SYNC = [
    ("__init__", "event"), ("__init__", "get"), ("__init__", "busy"), ("__init__", "get that is tried again"),
    ("endpoint", "event"), ("endpoint", "get"), ("endpoint", "busy"), ("endpoint", "get that is tried again"),
    ("__supervise__", "event"), ("__supervise__", "get"), ("__cleanup__", "event"), ("__cleanup__", "get"),
    ("endpoint", "native code"), ("__init__", "native code"),
]  # fmt: skip
ASYNC = [
    ("__init__", "event"), ("__init__", "get"), ("endpoint", "await"), ("endpoint", "swallow"), ("endpoint", "event"),
    ("endpoint", "get"), ("concurrent endpoint", "swallow"), ("__supervise__", "swallow"), ("__cleanup__", "await"),
    ("__cleanup__", "swallow"), ("endpoint", "native code"),
]  # fmt: skip
CASES = [
    # Native code ends after several time-outs, one behind the other.
    pytest.param(
        kind, where, how, id=f"{kind.__name__}-{where}-{how}", marks=[pytest.mark.slow] * (how == "native code")
    )
    for kind, cases in ((Stuck, SYNC), (AsyncStuck, ASYNC))
    for where, how in cases
]


@pytest.mark.parametrize(("kind", "where", "how"), CASES)
def test_a_stop_of_actors_ends(
    spawn: Callable[..., ProcMesh],
    shared: ProcMesh,
    hasty: None,
    faults: Faults,
    kind: type[Actor],
    where: str,
    how: str,
) -> None:
    with configured(process_exit_timeout=2.0 if how == "native code" else 5.0):
        # A thread that runs on would slow the others of its process.
        procs = spawn() if how in ("busy", "native code") else shared
        neighbour: Any = procs.spawn("neighbour", Log)
        pid = neighbour.pid.call_one().get(DEADLINE)
        port, receiver = Channel.open()
        stuck: Any = procs.spawn("stuck", kind, port, where, how)
        waiting = stuck.work.call_one() if where in ("__init__", "endpoint") else None
        if where == "__supervise__":
            stuck.lose_child.call_one().get(DEADLINE)
        elif where == "concurrent endpoint":
            stuck.work_beside.broadcast()
        if where != "__cleanup__":
            receiver.recv().get(DEADLINE)
        queued = stuck.work.call_one()
        stuck.stop().get(DEADLINE)
        if waiting is not None:
            assert isinstance(waiting.exception(DEADLINE), SupervisionError)
        if how == "native code":
            assert isinstance(queued.exception(DEADLINE), SupervisionError)
            failure = faults.wait()[0]
            assert "native code may hold its interpreter" in failure.event
            wait_gone(pid)
        else:
            assert neighbour.pid.call_one().get(DEADLINE) == pid
            queued.exception(DEADLINE)  # whichever way, it ends
            if how == "swallow" and where in ("concurrent endpoint", "__supervise__"):
                return  # it was left alone, and the actor has stopped
            failure = faults.wait()[0]
            assert "has not ended within" in failure.event
        assert failure.kind is FailureKind.STOP_TIMEOUT
        assert isinstance(stuck.work.call_one().exception(DEADLINE), SupervisionError)


def test_the_report_says_where_the_actor_is(shared: ProcMesh, hasty: None, faults: Faults) -> None:
    port, receiver = Channel.open()
    stuck: Any = shared.spawn("stuck", Stuck, port, "endpoint", "event")
    stuck.work.broadcast()
    receiver.recv().get(DEADLINE)
    stuck.stop().get(DEADLINE)
    event = faults.wait()[0].event
    assert "within 0.5 s of its stop (setting stop_actor_timeout); it is in work" in event
    assert "threading.Event().wait()" in event


def test_what_is_awaited_beside_ends_without_a_failure(shared: ProcMesh) -> None:
    """Concurrent endpoints and `__supervise__` are cancelled by a stop, long before its time is over."""
    for where in ("concurrent endpoint", "__supervise__"):
        port, receiver = Channel.open()
        actor: Any = shared.spawn("waits", AsyncStuck, port, where, "await")
        if where == "__supervise__":
            actor.lose_child.call_one().get(DEADLINE)
        else:
            actor.work_beside.broadcast()
        receiver.recv().get(DEADLINE)
        with configured(stop_actor_timeout=10 * DEADLINE):
            actor.stop().get(DEADLINE)


def test_a_stuck_actor_of_the_program_s_own_process_is_given_up(hasty: None, faults: Faults) -> None:
    port, receiver = Channel.open()
    stuck: Any = this_proc().spawn("stuck", Stuck, port, "__init__", "event")
    receiver.recv().get(DEADLINE)
    stuck.stop().get(DEADLINE)
    assert faults.wait()[0].kind is FailureKind.STOP_TIMEOUT


def test_what_a_stuck_actor_owns_ends_with_it(spawn: Callable[..., ProcMesh], hasty: None, faults: Faults) -> None:
    owner: Any = spawn().spawn("owner", Owner)
    pid = owner.start.call_one().get(DEADLINE)
    owner.block.broadcast()
    owner.stop().get(DEADLINE)
    faults.wait()
    wait_gone(pid)


def test_an_actor_that_stops_itself_and_goes_on_is_given_up(shared: ProcMesh, hasty: None, faults: Faults) -> None:
    with configured(stop_actor_timeout=0.5):
        actor: Any = shared.spawn("stops", Owner)
        actor.stop_and_block.broadcast()
        wait_until(lambda: faults.failures, "the failure")
    assert faults.failures[0].kind is FailureKind.STOP_TIMEOUT


class Owner(Actor):
    @endpoint
    def start(self) -> int:
        self.logs: Any = this_host().spawn_procs(name="inner").spawn("log", Log)
        pid: int = self.logs.pid.call_one().get()
        return pid

    @endpoint
    def block(self) -> None:
        threading.Event().wait()

    @endpoint
    def stop_and_block(self) -> None:
        configure(stop_actor_timeout=0.5)
        context().actor_instance.stop()
        threading.Event().wait()
