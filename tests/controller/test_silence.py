"""Processes that are stopped for longer than a silent host has: none of them is dead, and nothing is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job_agents import Agent, act_as_another_machine
from job_agents import Worker as PidActor
from support import DEADLINE, REPOSITORY, Program, hold, wait_until

from monarch_slurm.actor import Actor, HostMesh, MeshFailure, SupervisionError, endpoint
from monarch_slurm.actor.client import client
from monarch_slurm.config import configured, settings
from monarch_slurm.controller import gather_hosts, publish
from monarch_slurm.wire.bulk import Bulk

LONG = 1.5 * settings().heartbeat_interval * settings().missed_heartbeats
"""Seconds; longer than a silent machine has."""


def stop_for(seconds: float, *pids: int) -> None:
    for pid in pids:
        hold(pid)
    end = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > end)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def join(folder: Path, agents: Callable[..., Agent], where: str) -> tuple[HostMesh, Agent]:
    """Return a host whose agent is on this machine, or joins as if it were on another one."""
    publish(folder, address="127.0.0.1")
    if where == "far":
        act_as_another_machine(folder)
    agent = agents(folder, "one")
    hosts = gather_hosts(["one"], timeout=DEADLINE)
    assert client().hub.near.knows(hosts._hosts[0]) == (where == "near")
    return hosts, agent


@pytest.mark.parametrize("where", ["near", "far"])
def test_a_stopped_agent_is_not_lost(
    tmp_path: Path, agents: Callable[..., Agent], failures: list[MeshFailure], where: str
) -> None:
    hosts, agent = join(tmp_path / "job", agents, where)
    actors: Any = hosts.spawn_procs().spawn("actor", PidActor)
    pid = actors.pid.call_one().get(DEADLINE)
    with configured(direct_link_after=0):
        hold(agent.pid)
        waiting = actors.pid.call_one()
        stop_for(LONG, agent.pid)
        assert waiting.get(DEADLINE) == pid
    stop_for(LONG, pid)
    assert actors.pid.call_one().get(DEADLINE) == pid
    assert not failures


def test_an_agent_that_says_nothing_while_its_machine_answers_has_a_limit(
    tmp_path: Path, agents: Callable[..., Agent], failures: list[MeshFailure]
) -> None:
    hosts, agent = join(tmp_path / "job", agents, "far")
    actors: Any = hosts.spawn_procs().spawn("actor", PidActor)
    pid = agent.pid
    with configured(unresponsive_agent_timeout=0.1):
        hold(pid)
        error = actors.pid.call_one().exception(DEADLINE)
    os.kill(pid, signal.SIGCONT)
    assert isinstance(error, SupervisionError)
    assert "its agent said nothing for 0.1 s (setting unresponsive_agent_timeout), but its machine answers" in str(
        error
    )
    assert agent.wait() == 4  # fenced


def test_an_agent_that_has_ended_is_lost_at_once(
    tmp_path: Path, agents: Callable[..., Agent], failures: list[MeshFailure]
) -> None:
    hosts, agent = join(tmp_path / "job", agents, "far")
    actors: Any = hosts.spawn_procs().spawn("actor", PidActor)
    pid = agent.pid
    hold(pid)
    os.kill(pid, signal.SIGKILL)
    with configured(unresponsive_agent_timeout=3600):
        assert isinstance(actors.pid.call_one().exception(DEADLINE), SupervisionError)
    agent.wait()


def test_large_arguments_are_copied_before_the_lock_of_the_controllers_loop_is_taken(
    tmp_path: Path, agents: Callable[..., Agent], failures: list[MeshFailure], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, _ = join(tmp_path / "job", agents, "near")
    actors: Any = hosts.spawn_procs({"n": 2}).spawn("actor", Counting)
    copy, lock, under_lock = Bulk.of, client().hub._lock, []

    def watched(data: Any) -> Bulk:
        under_lock.append(lock._is_owned())  # type: ignore[attr-defined]
        return copy(data)

    monkeypatch.setattr(Bulk, "of", staticmethod(watched))
    for large in (bytes(40_000_000), bytearray(40_000_000)):
        assert actors.length.call(large).get(DEADLINE).values() == [40_000_000] * 2
        assert actors.slice(n=0).length.call_one(large).get(DEADLINE) == 40_000_000
    assert True not in under_lock


class Counting(Actor):
    @endpoint
    def length(self, data: bytes) -> int:
        return len(data)


PROGRAM = """
import os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import monarch_slurm.actor as actor
from monarch_slurm.actor import this_host
from monarch_slurm.controller import gather_hosts, publish, withdraw
from job_agents import Worker, act_as_another_machine

folder = Path("job")

def note(failure):
    print("fault", failure.report().splitlines()[0], flush=True)

actor.unhandled_fault_hook = note
publish(folder, address="127.0.0.1")
print("near", flush=True)
near = gather_hosts(["near"], timeout=60)
act_as_another_machine(folder)
print("far", flush=True)
far = gather_hosts(["far"], timeout=60)
actors = [hosts.spawn_procs().spawn("actor", Worker) for hosts in (this_host(), near, far)]
pids = [one.pid.call_one().get(60) for one in actors]
print("ready", flush=True)
while not Path("again").exists():  # its threads are held anywhere
    [one.pid.call_one().get(60) for one in actors]
assert [one.pid.call_one().get(60) for one in actors] == pids
print("same", flush=True)
withdraw(folder)
for hosts in (near, far):
    hosts.shutdown().get(60)
"""


def test_a_stopped_controller_loses_nothing(tmp_path: Path, agents: Callable[..., Agent]) -> None:
    """Nor do its agents give it up, although their lease is shorter than the time that it is stopped for."""
    program = Program(
        tmp_path,
        PROGRAM.format(tests=str(REPOSITORY / "tests")),
        env={"MONARCH_SLURM_MESH_ORPHAN_TIMEOUT": "2", "MONARCH_SLURM_UNRESPONSIVE_AGENT_TIMEOUT": "5"},
    )
    for name in ("near", "far"):
        program.expect(name)
        agents(tmp_path / "job", name)
    program.expect("ready")
    for _ in range(2):
        stop_for(LONG, program.process.pid)
    (tmp_path / "again").touch()
    program.expect("same")
    assert program.process.wait(DEADLINE) == 0
    assert "fault" not in program.output()
    assert "lost" not in program.errors()
    assert "refused" not in program.errors()
