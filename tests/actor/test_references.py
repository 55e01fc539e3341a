"""Meshes, ports and values that go into other procs and back, also while they are still being made."""

from __future__ import annotations

import gc
import multiprocessing
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from counter import Counter
from recorded_faults import Faults
from support import DEADLINE, wait_until

from monarch_slurm.actor import (
    Channel,
    HostMesh,
    Port,
    ProcMesh,
    SupervisionError,
    ValueMesh,
    context,
    current_rank,
    endpoint,
    send,
    this_host,
)


class Node(Counter):
    """Keeps and spawns things besides."""

    kept: Any = None

    @endpoint
    def keep(self, thing: Any) -> Any:
        self.kept = thing
        return thing

    @endpoint
    def use_kept(self, number: int) -> list[int]:
        values: list[int] = self.kept.add.call(number).get().values()
        return values

    @endpoint
    def spawn_on(self, procs: ProcMesh, start: int) -> Any:
        self.mine = procs.spawn("spawned", Node, start)
        return self.mine

    @endpoint
    def spawn_from(self, hosts: HostMesh) -> tuple[int, ProcMesh]:
        self.procs = hosts.spawn_procs({"n": 2})
        self.mine = self.procs.spawn("inner", Node, 5)
        return os.getpid(), self.procs

    @endpoint(explicit_response_port=True)
    def never(self, port: Port[int]) -> None:
        self.kept = port

    @endpoint
    def fork(self) -> tuple[int | None, str]:
        """Children of an actor's process: by fork, and of multiprocessing."""
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with multiprocessing.get_context("fork").Pool(1) as pool:
            return status, pool.apply(_in_child)

    @endpoint
    def rank(self) -> int:
        return current_rank().rank


def _in_child() -> str:
    try:
        this_host().spawn_procs()
    except RuntimeError as error:
        return str(error)
    return "possible"


@pytest.fixture(scope="module")
def nodes(grid: ProcMesh) -> Any:
    return grid.spawn("nodes", Node)


def test_everything_comes_back_as_what_it_was(grid: ProcMesh, nodes: Any) -> None:
    one = nodes.slice(x=0, y=0)
    port, receiver = Channel.open()
    for thing in (grid, grid.slice(x=1), this_host(), ValueMesh(grid.extent.region, [1, 2, 3, 4])):
        back = one.keep.call_one(thing).get(DEADLINE)
        assert type(back) is type(thing)
        assert back.extent == thing.extent
        assert not isinstance(thing, (ProcMesh, HostMesh)) or back == thing
    back = one.keep.call_one([nodes.slice(y=1), port]).get(DEADLINE)
    assert back[0].rank.call().get(DEADLINE).values() == [0, 1]
    back[1].send("through a port that was there and back")
    assert receiver.recv().get(DEADLINE) == "through a port that was there and back"
    again = one.spawn_on.call_one(grid.slice(x=1), 10).get(DEADLINE)
    other = nodes.slice(x=0, y=1)
    other.keep.call_one(again).get(DEADLINE)
    assert other.use_kept.call_one(1).get(DEADLINE) == [11, 11]
    assert again.slice(y=0).add.call_one(1).get(DEADLINE) == 12
    with pytest.raises(RuntimeError, match="only the process that spawned"):
        again.initialized  # noqa: B018


def test_meshes_that_are_still_being_made(spawn: Callable[..., ProcMesh], nodes: Any) -> None:
    procs = spawn(per_host={"n": 2})
    fresh: Any = procs.spawn("fresh", Node, 100)
    holder = nodes.slice(x=0, y=0)
    holder.keep.broadcast(fresh.slice(n=1))
    early = holder.use_kept.call_one(1)
    direct = fresh.slice(n=1).add.call_one(1)
    assert sorted([*early.get(DEADLINE), direct.get(DEADLINE)]) == [101, 102]
    more: Any = nodes.slice(x=1, y=0).spawn_on.call_one(spawn(per_host={"n": 1}), 7).get(DEADLINE)
    assert more.add.call(0).get(DEADLINE).values() == [7]


def test_a_mesh_that_was_being_made_by_one_that_failed(
    spawn: Callable[..., ProcMesh], nodes: Any, faults: Faults
) -> None:
    procs = this_host().spawn_procs({"n": 1}, bootstrap=_fail)
    fresh: Any = procs.spawn("fresh", Node)
    holder = nodes.slice(x=0, y=0)
    holder.keep.call_one(fresh).get(DEADLINE)
    assert "the bootstrap fails" in str(holder.use_kept.call_one(1).exception(DEADLINE))
    assert isinstance(fresh.add.call(1).exception(DEADLINE), SupervisionError)
    wait_until(lambda: faults.failures)


def _fail() -> None:
    raise RuntimeError("the bootstrap fails")


def test_hosts_can_be_sent_and_what_is_spawned_there_is_its_spawners(nodes: Any) -> None:
    one = nodes.slice(x=1, y=1)
    pid, procs = one.spawn_from.call_one(this_host()).get(DEADLINE)
    assert str(procs.extent) == "{n: 2}"
    mine: Any = procs.spawn("ours", Node, 3)
    assert mine.add.call(1).get(DEADLINE).values() == [4, 4]
    assert pid == one.pid.call_one().get(DEADLINE)
    mine.stop().get(DEADLINE)


def test_futures_that_are_dropped_leave_nothing(nodes: Any) -> None:
    replies = context().actor_instance.runtime.replies
    nodes.rank.call().get(DEADLINE)
    wait_until(lambda: not replies._replies, "what earlier tests wait for")
    for _ in range(200):
        nodes.rank.call()
        nodes.slice(x=0, y=0).rank.call_one()
        nodes.rank.stream()
    nodes.rank.call().get(DEADLINE)
    wait_until(lambda: not replies._replies, "no answer is waited for")
    future = nodes.rank.call()
    gone = weakref.ref(future)
    future.get(DEADLINE)
    del future
    gc.collect()
    assert gone() is None


def test_an_answer_that_nobody_waits_for_is_dropped(nodes: Any, grid: ProcMesh) -> None:
    doomed: Any = grid.slice(x=0, y=0).spawn("doomed", Node)
    pending = [doomed.never.call_one() for _ in range(10)]
    replies = context().actor_instance.runtime.replies
    assert len(replies._replies) >= 10
    doomed.stop().get(DEADLINE)
    assert all(isinstance(future.exception(DEADLINE), SupervisionError) for future in pending)
    wait_until(lambda: not replies._replies)


def test_processes_that_an_actor_forks(nodes: Any) -> None:
    status, text = nodes.slice(x=0, y=1).fork.call_one().get(DEADLINE)
    assert status == 7
    assert "was forked from one that has actors" in text
    assert nodes.rank.call().get(DEADLINE).values() == [0, 1, 2, 3]


def test_send_to_a_port_of_another_process(nodes: Any) -> None:
    port, receiver = Channel.open_ranked()
    send(nodes.rank, (), {}, port)
    assert sorted(receiver.recv().get(DEADLINE) for _ in range(4)) == [(0, 0), (1, 1), (2, 2), (3, 3)]
