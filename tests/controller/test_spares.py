"""Hosts that take the places of lost ones: references stay valid, owners are told, and what if no host is left."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from counter import Counter
from job_agents import Agent, act_as_another_machine
from support import DEADLINE, hold, wait_gone, wait_until

from monarch_slurm.actor import (
    Actor,
    ActorRestartedError,
    HostMesh,
    MeshFailure,
    RestartPolicy,
    SupervisionError,
    endpoint,
)
from monarch_slurm.actor.client import client
from monarch_slurm.actor.stand_ins import ASKED_FOR
from monarch_slurm.config import configured
from monarch_slurm.controller import gather_hosts, keep_whole, publish
from monarch_slurm.host import HostDown

MANY = RestartPolicy(max_restarts=100)


class Speaker(Counter):
    @endpoint
    def say(self, text: str) -> None:
        print(text, flush=True)


class Owner(Actor):
    """Owns a mesh, calls it, and is told of its failures."""

    def __init__(self) -> None:
        self.told: list[tuple[bool, tuple[int, ...], str | None, str]] = []

    @endpoint
    def start(self, hosts: HostMesh, policy: RestartPolicy | None) -> Any:
        self.counters: Any = hosts.spawn_procs({"n": 2}, restart=policy).spawn("counter", Counter, 10)
        self.counters.add.call(1).get()
        return self.counters

    @endpoint
    def add(self, n: int, counters: Any = None) -> list[int] | str:
        try:
            values: list[int] = (counters or self.counters).add.call(n).get().values()
        except SupervisionError as error:
            return type(error).__name__
        return values

    @endpoint
    def failures(self) -> list[tuple[bool, tuple[int, ...], str | None, str]]:
        return self.told

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.told.append((failure.restarted, failure.crashed_ranks, failure.host, failure.replaced_by))
        return True


class Hosts:
    """Hosts of one job, and spares."""

    def __init__(self, folder: Path, agents: Callable[..., Agent]) -> None:
        publish(folder, address="127.0.0.1")
        act_as_another_machine(folder)
        self._folder, self._agents = folder, agents
        self.agents: dict[str, Agent] = {}

    def start(self, *names: str) -> None:
        for name in names:
            self.agents[name] = self._agents(self._folder, name)

    def mesh(self, count: int, spares: int = 0, **kwargs: Any) -> HostMesh:
        names, extra = [f"h{i}" for i in range(count)], [f"s{i}" for i in range(spares)]
        self.start(*names, *extra)
        mesh = gather_hosts(names, timeout=DEADLINE)
        self.pool = keep_whole([mesh], extra, **kwargs)
        return mesh

    def kill(self, name: str) -> None:
        os.kill(self.agents[name].pid, signal.SIGKILL)
        self.agents[name].wait()


@pytest.fixture
def hosts(tmp_path: Path, agents: Callable[..., Agent], failures: list[MeshFailure]) -> Iterator[Hosts]:
    made = Hosts(tmp_path / "job", agents)
    yield made
    client().look_away(made.pool)


def eventually(call: Callable[[], Any]) -> Any:
    """What ``call`` returns once it reaches actors that have started again."""

    def once() -> Any:
        try:
            return (call(),)
        except ActorRestartedError:
            return None

    return wait_until(once)[0]


def test_a_spare_takes_the_place_of_a_lost_host(hosts: Hosts, failures: list[MeshFailure]) -> None:
    mesh = hosts.mesh(3, spares=1)
    counters: Any = mesh.spawn_procs({"n": 2}, restart=MANY).spawn("counter", Counter, 10)
    part = counters.slice(hosts=1)
    observer: Any = mesh.slice(hosts=2).spawn_procs().spawn("observer", Owner)
    plain: Any = mesh.slice(hosts=1).spawn_procs().spawn("plain", Counter, 0)
    assert observer.add.call_one(1, part).get(DEADLINE) == [11, 11]
    plain.add.call_one(1).get(DEADLINE)
    old = counters.pid.call().get(DEADLINE).values()
    hosts.kill("h1")
    eventually(lambda: counters.add.call(1).get(DEADLINE))
    # In place, with the original arguments, for the program and for actors on other hosts.
    assert counters.rank.call().get(DEADLINE).values() == list(range(6))
    new = counters.pid.call().get(DEADLINE).values()
    assert [i for i in range(6) if old[i] != new[i]] == [2, 3]
    wait_gone(*old[2:4])
    values = part.add.call(1).get(DEADLINE).values()
    assert observer.add.call_one(1, part).get(DEADLINE) == [value + 1 for value in values]
    assert mesh.host_names == ["h0", "s0", "h2"]
    # What has no restart policy is its owner's business, who finds the other host in the same mesh.
    wait_until(lambda: failures)
    (failure,) = failures
    assert (failure.mesh_name, failure.replaced_by, failure.restarted) == (plain._name.get(), "s0", False)
    assert "h1" in failure.report()
    assert "s0 takes its place" in failure.report()
    with pytest.raises(SupervisionError, match="h1"):
        plain.add.call_one(1).get(DEADLINE)
    again: Any = mesh.slice(hosts=1).spawn_procs().spawn("again", Counter, 5)
    assert again.add.call_one(1).get(DEADLINE) == 6
    assert again.pid.call_one().get(DEADLINE) not in new
    (replacement,) = [item for item in client().stand_ins.replacements if item.lost == "h1"][-1:]
    assert replacement.by == "s0"


@pytest.mark.parametrize(
    ("strategy", "anew"), [("one_for_one", {1}), ("one_for_all", {0, 1, 2}), ("rest_for_one", {1, 2})]
)
def test_the_strategy_holds_for_a_lost_host(hosts: Hosts, strategy: Any, anew: set[int]) -> None:
    mesh = hosts.mesh(3, spares=1)
    counters: Any = mesh.spawn_procs(restart=RestartPolicy(strategy)).spawn("counter", Counter, 10)
    old = counters.pid.call().get(DEADLINE).values()
    hosts.kill("h1")

    def all_anew() -> list[int] | None:
        try:
            new: list[int] = counters.pid.call().get(DEADLINE).values()
        except ActorRestartedError:
            return None
        return new if all(new[rank] != old[rank] for rank in anew) else None

    new = wait_until(all_anew)
    assert {rank for rank in range(3) if new[rank] != old[rank]} == anew


def test_one_host_after_the_other(hosts: Hosts) -> None:
    mesh = hosts.mesh(2, spares=2)
    counters: Any = mesh.spawn_procs(restart=MANY).spawn("counter", Counter, 10)
    counters.add.call(1).get(DEADLINE)
    used = ["h1"]
    for _ in range(2):
        hosts.kill(used[-1])
        eventually(lambda: counters.add.call(1).get(DEADLINE))
        used.append(mesh.host_names[1])
    assert sorted(used) == ["h1", "s0", "s1"]
    # A proc that starts only now knows of the moves, and hears of a loss of the host that stands there.
    late: Any = mesh.slice(hosts=0).spawn_procs().spawn("late", Owner)
    assert isinstance(late.add.call_one(1, counters).get(DEADLINE), list)
    hosts.kill(used[-1])
    assert wait_until(lambda: late.add.call_one(1, counters).get(DEADLINE)) == "SupervisionError"


def test_the_keeper_may_be_an_actor(hosts: Hosts) -> None:
    mesh = hosts.mesh(2, spares=1)
    owner: Any = mesh.slice(hosts=0).spawn_procs().spawn("owner", Owner)
    counters = owner.start.call_one(mesh, MANY).get(DEADLINE)
    hosts.kill("h1")
    wait_until(lambda: isinstance(owner.add.call_one(1).get(DEADLINE), list))
    assert len(eventually(lambda: counters.add.call(1).get(DEADLINE)).values()) == 4
    assert owner.failures.call_one().get(DEADLINE) == [(True, (2, 3), "h1", "s0")]


def test_an_owner_without_a_policy_spawns_anew_at_once(hosts: Hosts) -> None:
    mesh = hosts.mesh(2, spares=1)
    owner: Any = mesh.slice(hosts=0).spawn_procs().spawn("owner", Owner)
    owner.start.call_one(mesh, None).get(DEADLINE)
    hosts.kill("h1")
    told = wait_until(lambda: owner.failures.call_one().get(DEADLINE))
    assert told == [(False, (2, 3), "h1", "s0")]
    counters = owner.start.call_one(mesh, None).get(DEADLINE)
    assert counters.add.call(1).get(DEADLINE).values() == [12] * 4


def test_a_silent_host_is_replaced_and_cannot_speak_any_more(hosts: Hosts) -> None:
    mesh = hosts.mesh(2, spares=1)
    counters: Any = mesh.spawn_procs(restart=MANY).spawn("counter", Counter, 10)
    old = counters.pid.call().get(DEADLINE).values()
    agent = hosts.agents["h1"]
    silent = [agent.pid, old[1]]
    for pid in silent:
        hold(pid)
    try:
        with configured(unresponsive_agent_timeout=0.1):  # its machine answers, being this one
            eventually(lambda: counters.add.call(1).get(DEADLINE))
        assert mesh.host_names == ["h0", "s0"]
    finally:
        for pid in silent:
            os.kill(pid, signal.SIGCONT)
    assert agent.wait() == 4  # fenced
    wait_gone(old[1])
    assert counters.pid.call().get(DEADLINE).values()[0] == old[0]


def test_lines_of_procs_that_move_come_as_before(hosts: Hosts, capfd: pytest.CaptureFixture[str]) -> None:
    mesh = hosts.mesh(2, spares=1)
    procs = mesh.spawn_procs(restart=MANY)
    asyncio.run(procs.logging_option(stream_to_client=True))
    counters: Any = procs.spawn("counter", Speaker, 10)
    counters.add.call(1).get(DEADLINE)
    hosts.kill("h1")
    eventually(lambda: counters.slice(hosts=1).say.call_one("said at the spare").get(DEADLINE))
    wait_until(lambda: "said at the spare" in capfd.readouterr().out)


def test_a_policy_that_is_over_gives_the_procs_up(hosts: Hosts) -> None:
    mesh = hosts.mesh(2, spares=1)
    counters: Any = mesh.spawn_procs(restart=RestartPolicy(max_restarts=0)).spawn("counter", Counter, 10)
    counters.add.call(1).get(DEADLINE)
    hosts.kill("h1")

    def error() -> BaseException | None:
        return counters.slice(hosts=1).add.call_one(1).exception(DEADLINE)

    assert type(wait_until(error)) is SupervisionError
    assert counters.slice(hosts=0).add.call_one(1).get(DEADLINE) == 12


def test_without_a_spare_the_mesh_shrinks_until_a_host_comes(hosts: Hosts, failures: list[MeshFailure]) -> None:
    mesh = hosts.mesh(2)
    counters: Any = mesh.spawn_procs(restart=MANY).spawn("counter", Counter, 10)
    counters.add.call(1).get(DEADLINE)
    hosts.kill("h1")
    wait_until(lambda: failures)
    assert {failure.replaced_by for failure in failures} == {""}
    with pytest.raises(SupervisionError, match="h1"):
        counters.slice(hosts=1).add.call_one(1).get(DEADLINE)
    assert counters.slice(hosts=0).add.call_one(1).get(DEADLINE) == 12
    hosts.start("h1")  # the node is back, with a new agent
    joined = wait_until(lambda: [info for info in client().joined if info.name == "h1"])
    wait_until(lambda: mesh._now_at()[1] == joined[0].host)
    again: Any = mesh.spawn_procs().spawn("again", Counter, 5)
    assert again.add.call(1).get(DEADLINE).values() == [6, 6]


@pytest.mark.parametrize("comes", [True, False])
def test_a_host_that_is_asked_for_is_waited_for(hosts: Hosts, failures: list[MeshFailure], comes: bool) -> None:
    asked: list[tuple[HostDown, str]] = []
    mesh = hosts.mesh(2, on_lost="request", request=lambda down, place: asked.append((down, place)))
    counters: Any = mesh.spawn_procs(restart=MANY).spawn("counter", Counter, 10)
    counters.add.call(1).get(DEADLINE)
    part = counters.slice(hosts=1)
    hosts.kill("h1")
    wait_until(lambda: asked)
    ((down, place),) = asked
    assert down.host_name == "h1"
    wait_until(lambda: mesh._now_at()[1] == place)
    wait_until(lambda: isinstance(part.add.call_one(0).exception(0.01), TimeoutError))  # nothing fails any more
    for _ in range(20):
        part.add.broadcast(1)
    calls = [part.add.call_one(1) for _ in range(20)]
    fresh: Any = mesh.slice(hosts=1).spawn_procs().spawn("fresh", Counter, 5)
    later = fresh.add.call_one(1)
    if comes:
        hosts.pool.names.add("new")
        hosts.start("new")
        assert [call.get(DEADLINE) for call in calls] == list(range(31, 51))
        assert later.get(DEADLINE) == 6
        assert mesh.host_names == ["h0", "new"]
        # The host that has come can be lost in its turn.
        hosts.kill("new")
        wait_until(lambda: len(asked) == 2)
        assert wait_until(lambda: any(failure.replaced_by == ASKED_FOR for failure in failures))
    else:
        client().abandon(place, "the queue is full")
        for call in [*calls, later]:
            with pytest.raises(SupervisionError, match="the queue is full"):
                call.get(DEADLINE)


def test_a_program_may_fail_for_want_of_a_host(hosts: Hosts, failures: list[MeshFailure]) -> None:
    mesh = hosts.mesh(2, spares=1, on_lost="fail")
    hosts.kill("h1")
    wait_until(lambda: mesh.host_names == ["h0", "s0"])
    assert not failures
    hosts.kill("h0")
    wait_until(lambda: failures)
    assert [failure.host for failure in failures] == ["h0"]
    assert "host h0 is lost, and no other is left to take its place" in failures[0].report()


def test_hosts_that_are_shut_down_are_not_replaced(hosts: Hosts, failures: list[MeshFailure]) -> None:
    asked: list[str] = []
    mesh = hosts.mesh(2, on_lost="request", request=lambda down, place: asked.append(place))
    hosts.kill("h1")
    wait_until(lambda: asked)
    mesh.shutdown().get(DEADLINE)
    assert hosts.agents["h0"].wait() == 0
    assert (len(asked), failures) == (1, [])
