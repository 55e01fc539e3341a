"""Procs and actors that start again in place: strategies, references, calls at every moment, limits."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import counter
import pytest
from recorded_faults import Faults
from sample_actors import Caller
from support import DEADLINE, wait_gone, wait_until

from monarch_slurm.actor import (
    Actor,
    ActorRestartedError,
    Channel,
    MeshFailure,
    Port,
    ProcMesh,
    RestartPolicy,
    SupervisionError,
    concurrent_endpoint,
    context,
    endpoint,
    this_host,
    this_proc,
)

MANY = 1000


class Counter(counter.Counter):
    """Fails, waits and owns meshes besides."""

    def __init__(self, start: int = 0, fail_if: str = "") -> None:
        if fail_if and Path(fail_if).exists():
            raise ValueError("no good init")
        super().__init__(start)
        self.inner: Any = None

    @endpoint
    def block(self, port: Port[int]) -> None:
        port.send(os.getpid())
        threading.Event().wait()

    @endpoint
    def fail(self, kind: type[BaseException] = ValueError) -> None:
        raise kind("on purpose")

    @endpoint
    def open(self) -> tuple[Port[object], int]:
        """A port of this incarnation, and what came to it."""
        port, self.receiver = Channel.open()
        return port, os.getpid()

    @endpoint
    def received(self) -> object:
        try:
            return self.receiver.recv().get(0.2)
        except TimeoutError:
            return None

    @endpoint
    def start_inner(self, restart: RestartPolicy | None = None) -> int:
        self.inner = this_host().spawn_procs(name="inner", restart=restart).spawn("inner", Counter)
        pid: int = self.inner.pid.call_one().get()
        return pid

    @endpoint
    def spawn_here(self) -> Any:
        self.inner = this_proc().spawn("here", Counter)
        self.inner.add.call_one(1).get()
        return self.inner

    @endpoint
    def get_inner(self) -> Any:
        return self.inner


class Owner(Actor):
    """Owns a restartable mesh and is told of it."""

    def __init__(self) -> None:
        self.told: list[tuple[bool, tuple[int, ...], str]] = []

    @endpoint
    def start(self, count: int, policy: RestartPolicy) -> Any:
        self.procs = this_host().spawn_procs({"n": count}, name="owned", restart=policy)
        self.counters: Any = self.procs.spawn("counter", Counter)
        return self.counters

    @endpoint
    def failures(self) -> list[tuple[bool, tuple[int, ...], str]]:
        return self.told

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.told.append((failure.restarted, failure.crashed_ranks, failure.exit or ""))
        return not failure.restarted


class AsyncCounter(Actor):
    @concurrent_endpoint
    async def call(self, other: Any, n: int) -> int:
        result: int = await other.add.call_one(n)
        return result

    @concurrent_endpoint
    async def fail(self) -> None:
        raise ValueError("on purpose")

    @endpoint
    async def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def restartable(spawn: Callable[..., ProcMesh]) -> Callable[..., ProcMesh]:
    def spawn_procs(count: int = 3, strategy: Any = "one_for_one", max_restarts: int = MANY, **kwargs: Any) -> ProcMesh:
        return spawn(per_host={"n": count}, restart=RestartPolicy(strategy, max_restarts, **kwargs))

    return spawn_procs


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def pids_of(mesh: Any) -> list[int]:
    values: list[int] = mesh.pid.call().get(DEADLINE).values()
    return values


def restarted_pids(mesh: Any, old: list[int], ranks: set[int]) -> list[int]:
    """Wait until ``ranks`` have a new process each, and return all pids."""

    def changed() -> list[int] | None:
        try:
            new = pids_of(mesh)
        except ActorRestartedError:
            return None
        return new if all(new[rank] != old[rank] for rank in ranks) else None

    pids: list[int] = wait_until(changed)
    return pids


@pytest.mark.parametrize(
    ("strategy", "replaced"), [("one_for_one", {1}), ("one_for_all", {0, 1, 2, 3}), ("rest_for_one", {1, 2, 3})]
)
def test_a_killed_proc_and_those_of_its_strategy_start_again(
    restartable: Callable[..., ProcMesh], strategy: str, replaced: set[int]
) -> None:
    mesh = restartable(4, strategy)
    counters: Any = mesh.spawn("counter", Counter, 10)
    assert counters.add.call(1).get(DEADLINE).values() == [11] * 4
    old = pids_of(counters)
    kill(old[1])
    new = restarted_pids(counters, old, replaced)
    assert {rank for rank in range(4) if new[rank] != old[rank]} == replaced
    wait_gone(*(old[rank] for rank in replaced))
    # Anew with the original arguments, in place.
    assert counters.add.call(1).get(DEADLINE).values() == [11 if rank in replaced else 12 for rank in range(4)]
    assert counters.rank.call().get(DEADLINE).values() == [0, 1, 2, 3]
    late: Any = mesh.spawn("late", Counter, 5)
    assert late.add.call(1).get(DEADLINE).values() == [6] * 4


def test_a_call_in_flight_ends_and_says_that_the_actor_was_restarted(restartable: Callable[..., ProcMesh]) -> None:
    counters: Any = restartable().spawn("counter", Counter)
    port, receiver = Channel.open()
    waiting = counters.slice(n=1).block.call_one(port)
    pid = receiver.recv().get(DEADLINE)
    others = counters.slice(n=0).add.call_one(1)
    kill(pid)
    error = waiting.exception(DEADLINE)
    assert isinstance(error, ActorRestartedError)
    assert isinstance(error, SupervisionError)
    for part in (
        "Endpoint call counter.block() failed",
        "Killed(sig=9)",
        f"pid {pid}",
        "It was restarted",
        "{'n': 1/3}",
    ):
        assert part in str(error)
    assert others.get(DEADLINE) == 1
    # Whoever has seen the error reaches the new one.
    assert counters.slice(n=1).pid.call_one().get(DEADLINE) != pid


def test_calls_during_a_restart_wait_for_it_in_order(restartable: Callable[..., ProcMesh]) -> None:
    counter: Any = restartable(1, backoff=0.5).spawn("counter", Counter).flatten("n").slice(n=0)
    for _ in range(3):  # the second restart in a row and the third wait
        port, receiver = Channel.open()
        waiting = counter.block.call_one(port)
        kill(receiver.recv().get(DEADLINE))
        assert isinstance(waiting.exception(DEADLINE), ActorRestartedError)
        for _ in range(50):
            counter.add.broadcast(1)
        calls = [counter.add.call_one(1) for _ in range(50)]
        assert [call.get(DEADLINE) for call in calls] == list(range(51, 101))


def test_references_everywhere_stay_valid(restartable: Callable[..., ProcMesh], grid: ProcMesh) -> None:
    mesh = restartable(2)
    counters: Any = mesh.spawn("counter", Counter)
    part = counters.slice(n=1)
    caller: Any = grid.slice(x=0, y=1).spawn("caller", Caller)
    assert caller.call.call_one(part, 1).get(DEADLINE) == [1]
    asynchronous: Any = grid.slice(x=1, y=1).spawn("caller", AsyncCounter)
    assert asynchronous.call.call_one(part, 1).get(DEADLINE) == 2
    # spawned by another actor, on a mesh that was sent to it
    foreign = caller.spawn_on.call_one(mesh, "x").get(DEADLINE)
    assert foreign.get.call().get(DEADLINE).values() == [["x"], ["x"]]
    foreign.add.call("y").get(DEADLINE)
    old = pids_of(counters)
    kill(old[1])
    restarted_pids(counters, old, {1})
    assert part.add.call_one(5).get(DEADLINE) == 5
    assert caller.call.call_one(part, 1).get(DEADLINE) == [6]
    assert asynchronous.call.call_one(part, 1).get(DEADLINE) == 7
    assert foreign.get.call().get(DEADLINE).values() == [["x", "y"], ["x"]]
    # one proc of the mesh calls another
    inner: Any = mesh.slice(n=0).spawn("caller", Caller)
    assert inner.call.call_one(part, 1).get(DEADLINE) == [8]


def test_what_was_sent_to_an_old_incarnation_does_not_reach_the_new_one(restartable: Callable[..., ProcMesh]) -> None:
    counter: Any = restartable(1).spawn("counter", Counter).slice(n=0)
    stale, pid = counter.open.call_one().get(DEADLINE)
    kill(pid)
    restarted_pids(counter.flatten("n"), [pid], {0})
    fresh, new = counter.open.call_one().get(DEADLINE)
    assert new != pid
    stale.send("for the old one")
    assert counter.received.call_one().get(DEADLINE) is None
    fresh.send("for the new one")
    assert counter.received.call_one().get(DEADLINE) == "for the new one"


def test_stopped_actors_are_not_made_anew(restartable: Callable[..., ProcMesh]) -> None:
    mesh = restartable(1)
    gone: Any = mesh.spawn("gone", Counter)
    stays: Any = mesh.spawn("stays", Counter)
    gone.stop().get(DEADLINE)
    old = pids_of(stays)
    kill(old[0])
    restarted_pids(stays, old, {0})
    assert isinstance(gone.add.call(1).exception(DEADLINE), SupervisionError)


def test_a_mesh_that_a_restarted_actor_owned_ends_with_it(restartable: Callable[..., ProcMesh], faults: Faults) -> None:
    counters: Any = restartable(2).spawn("counter", Counter)
    one = counters.slice(n=0)
    plain, kept = one.start_inner.call_one().get(DEADLINE), None
    plain_mesh = one.get_inner.call_one().get(DEADLINE)
    kept = one.start_inner.call_one(RestartPolicy(max_restarts=MANY)).get(DEADLINE)
    kept_mesh = one.get_inner.call_one().get(DEADLINE)
    old = pids_of(counters)
    kill(old[0])
    restarted_pids(counters, old, {0})
    wait_gone(plain, kept)
    for mesh in (plain_mesh, kept_mesh):
        assert isinstance(mesh.pid.call_one().exception(DEADLINE), SupervisionError)
    assert one.start_inner.call_one().get(DEADLINE) not in (plain, kept)
    assert not faults.failures


def test_an_actor_that_a_restarted_actor_spawned_beside_itself_is_not_made_anew(
    restartable: Callable[..., ProcMesh],
) -> None:
    counters: Any = restartable(1).spawn("counter", Counter)
    inner = counters.slice(n=0).spawn_here.call_one().get(DEADLINE)
    assert inner.add.call_one(1).get(DEADLINE) == 2
    old = pids_of(counters)
    kill(old[0])
    restarted_pids(counters, old, {0})
    assert isinstance(inner.add.call_one(1).exception(DEADLINE), SupervisionError)
    again = counters.slice(n=0).spawn_here.call_one().get(DEADLINE)
    assert again.add.call_one(1).get(DEADLINE) == 2


@pytest.mark.parametrize("how", ["base", "broadcast", "concurrent", "abort"])
def test_a_failed_actor_starts_again_with_its_proc(restartable: Callable[..., ProcMesh], how: str) -> None:
    class Aborter(Counter):
        @endpoint
        def abort(self) -> None:
            context().actor_instance.abort("enough")

    mesh = restartable(2)
    actors: Any = mesh.spawn("actor", AsyncCounter if how == "concurrent" else Aborter)
    beside: Any = mesh.spawn("beside", Counter)
    old = pids_of(actors)
    beside.add.call(1).get(DEADLINE)
    target = actors.slice(n=1)
    if how == "base":
        error = target.fail.call_one(KeyboardInterrupt).exception(DEADLINE)
        assert isinstance(error, ActorRestartedError)
        assert "KeyboardInterrupt: on purpose" in str(error)
        assert "It was restarted" in str(error)
    elif how == "abort":
        target.abort.broadcast()
    else:
        target.fail.broadcast()
    new = restarted_pids(actors, old, {1})
    assert new[0] == old[0]
    assert beside.add.call(1).get(DEADLINE).values() == [2, 1]


def test_the_limit(restartable: Callable[..., ProcMesh], faults: Faults) -> None:
    counters: Any = restartable(2, max_restarts=2).spawn("counter", Counter)
    target = counters.slice(n=1)
    for _ in range(2):
        old = pids_of(counters)
        kill(old[1])
        restarted_pids(counters, old, {1})
    assert not faults.failures
    pid = target.pid.call_one().get(DEADLINE)
    port, receiver = Channel.open()
    waiting = target.block.call_one(port)
    receiver.recv().get(DEADLINE)
    kill(pid)
    error = waiting.exception(DEADLINE)
    assert isinstance(error, SupervisionError)
    assert not isinstance(error, ActorRestartedError)
    assert "Killed(sig=9)" in str(error)
    (failure,) = faults.wait()
    assert (failure.restarted, failure.crashed_ranks, failure.exit) == (False, (1,), "Killed(sig=9)")
    assert isinstance(target.pid.call_one().exception(0.5), SupervisionError)
    assert counters.slice(n=0).add.call_one(1).get(DEADLINE) == 1


def test_an_init_that_fails_counts_until_the_limit(
    restartable: Callable[..., ProcMesh], faults: Faults, tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    counters: Any = restartable(2, max_restarts=3).spawn("counter", Counter, 0, str(bad))
    old = pids_of(counters)
    bad.touch()
    kill(old[0])  # and three more starts fail
    (failure,) = faults.wait()
    assert failure.crashed_ranks == (0,)
    assert "ValueError: no good init" in failure.report()
    assert "ValueError: no good init" in (failure.traceback or "")
    error = counters.slice(n=0).add.call_one(1).exception(DEADLINE)
    assert isinstance(error, SupervisionError)
    assert "no good init" in str(error)
    assert pids_of(counters.slice(n=slice(1, 2))) == old[1:]


def test_an_init_that_fails_at_first_is_tried_again(restartable: Callable[..., ProcMesh], tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.touch()
    counters: Any = restartable(1, backoff=0.2).spawn("counter", Counter, 0, str(bad))
    call = counters.add.call(1)
    wait_until(lambda: call.exception(DEADLINE))
    bad.unlink()
    counters.initialized.get(DEADLINE)
    wait_until(lambda: counters.add.call(1).exception(DEADLINE) is None)


@pytest.mark.parametrize("policy", [RestartPolicy(max_restarts=1), RestartPolicy("one_for_all", max_restarts=1)])
def test_the_owner_is_told(grid: ProcMesh, policy: RestartPolicy) -> None:
    owner: Any = grid.slice(x=0, y=0).spawn("owner", Owner)
    counters = owner.start.call_one(2, policy).get(DEADLINE)
    old = pids_of(counters)
    kill(old[1])
    ranks = [1] if policy.strategy == "one_for_one" else [1, 0]
    wait_until(lambda: len(owner.failures.call_one().get(DEADLINE)) == len(ranks))
    assert owner.failures.call_one().get(DEADLINE) == [(True, (rank,), "Killed(sig=9)") for rank in ranks]
    new = restarted_pids(counters, old, set(ranks))
    kill(new[0])
    last = wait_until(lambda: owner.failures.call_one().get(DEADLINE)[len(ranks) :])
    assert last == [(False, (0,), "Killed(sig=9)")]
    # The other rank goes on.
    assert pids_of(counters.slice(n=slice(1, 2))) == new[1:]
    owner.stop().get(DEADLINE)
    wait_gone(*new)


def test_a_restart_is_no_failure_of_an_owner_without_supervise(grid: ProcMesh) -> None:
    owner: Any = grid.slice(x=0, y=0).spawn("owner", Counter)
    pid = owner.start_inner.call_one(RestartPolicy(max_restarts=MANY)).get(DEADLINE)
    inner = owner.get_inner.call_one().get(DEADLINE).flatten("n")
    kill(pid)
    (new,) = restarted_pids(inner, [pid], {0})
    assert owner.add.call_one(1).get(DEADLINE) == 1
    owner.stop().get(DEADLINE)
    wait_gone(new)


@pytest.mark.parametrize("what", ["actors", "procs", "owner"])
def test_a_stop_while_a_restart_waits(grid: ProcMesh, what: str) -> None:
    owner: Any = grid.slice(x=0, y=0).spawn("owner", Owner)
    counters = owner.start.call_one(1, RestartPolicy(max_restarts=MANY, backoff=3600.0)).get(DEADLINE)
    for times in (1, 2):
        (pid,) = pids_of(counters)
        kill(pid)
        wait_until(lambda times=times: len(owner.failures.call_one().get(DEADLINE)) == times)
        if times == 1:
            restarted_pids(counters, [pid], {0})
    held = counters.add.call(1)  # for the next restart, which is an hour away
    if what == "owner":
        owner.stop().get(DEADLINE)
    elif what == "procs":
        context_procs = ProcMesh(counters._ref.layout, counters._ref.shape, "owned")
        context_procs.stop().get(DEADLINE)
    else:
        counters.stop()
        owner.stop().get(DEADLINE)
    assert isinstance(held.exception(DEADLINE), SupervisionError)
    if what == "procs":
        assert isinstance(counters.add.call(1).exception(DEADLINE), SupervisionError)
        owner.stop().get(DEADLINE)


def test_restarts_while_many_call(restartable: Callable[..., ProcMesh], grid: ProcMesh) -> None:
    """Kills at random moments of calls from several processes: each call ends, and with a value or as restarted."""

    class Hammer(Actor):
        @endpoint
        def hammer(self, other: Any, port: Port[bool]) -> tuple[int, int]:
            done = restarted = 0
            port.send(True)
            while done < 300:
                try:
                    other.add.call(1).get(DEADLINE)
                    done += 1
                except ActorRestartedError:
                    restarted += 1
            return done, restarted

    counters: Any = restartable(2, "one_for_all").spawn("counter", Counter)
    hammers: Any = grid.spawn("hammer", Hammer)
    port, receiver = Channel.open()
    results = hammers.hammer.call(counters, port)
    for _ in range(4):
        receiver.recv().get(DEADLINE)
    for _ in range(3):
        old = pids_of_patiently(counters)
        kill(old[0])
        restarted_pids(counters, old, {0, 1})
    for done, _ in results.get(DEADLINE).values():
        assert done == 300


def pids_of_patiently(mesh: Any) -> list[int]:
    pids: list[int] = wait_until(lambda: mesh.pid.call().exception(DEADLINE) is None and pids_of(mesh))
    return pids


@pytest.mark.parametrize(
    "bad", [{"strategy": "all"}, {"max_restarts": -1}, {"max_restarts": 1.5}, {"within": 0.0}, {"backoff": -1.0}]
)
def test_a_policy_that_makes_no_sense(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        RestartPolicy(**bad)


@pytest.fixture(autouse=True)
def _no_port_is_left() -> Iterator[None]:
    """Whatever was waited for has ended."""
    yield
    replies = context().actor_instance.runtime.replies
    wait_until(lambda: not replies._by_key, f"no call to wait any more: {replies._replies}")
