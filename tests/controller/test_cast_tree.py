"""Casts that go down a tree of real agents: with a fan-out of 2, a few hosts make a deep one."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from job_agents import Agent, act_as_another_machine
from support import DEADLINE, wait_until

from monarch_slurm.actor import Actor, HostMesh, MeshFailure, SupervisionError, endpoint, send
from monarch_slurm.actor.client import client
from monarch_slurm.config import configured
from monarch_slurm.controller import gather_hosts, publish
from monarch_slurm.wire import AGENT, Address, JobKeys, Message, read_invitation
from monarch_slurm.wire.frames import encode
from monarch_slurm.wire.sockets import connect_tcp, make_dealer

FANOUT, HOSTS = 2, 7


class Log(Actor):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    @endpoint
    def add(self, item: Any) -> None:
        self.seen.append(item)

    @endpoint
    def get(self) -> list[Any]:
        return self.seen

    @endpoint
    def tell(self, whom: list[Any], name: str, count: int, seed: int) -> list[list[int]]:
        return talk(whom, name, count, seed)


def talk(parts: list[Any], name: str, count: int, seed: int) -> list[list[int]]:
    """Send numbers to parts of a mesh by all adverbs; return, by part, which."""
    generator = random.Random(seed)
    sent: list[list[int]] = [[] for _ in parts]
    pending = []
    for number in range(count):
        index = generator.randrange(len(parts))
        item = (name, number)
        sent[index].append(number)
        adverb = generator.randrange(4)
        if adverb == 0:
            parts[index].add.broadcast(item)
        elif adverb == 1:
            pending.append(parts[index].add.call(item))
        elif adverb == 2:
            pending += parts[index].add.stream(item)
        else:
            send(parts[index].add, (item,), {})
    for future in pending:
        future.get(DEADLINE)
    return sent


class Tree:
    """Hosts in a tree, and the way that casts take to each."""

    def __init__(self, hosts: HostMesh, agents: list[Agent]) -> None:
        self.mesh = hosts
        self.tree = client().hub._caster.tree
        self.agents = dict(zip(hosts._hosts, agents, strict=True))
        wait_until(self.whole, "every host is linked to the one above")

    def whole(self) -> bool:
        return all(self.tree.linked(host) or self.tree.parent(host) is None for host in self.mesh._hosts)

    def below(self, host: str) -> list[str]:
        """The hosts of the mesh that are reached through ``host``."""
        return [other for other in self.mesh._hosts if host in self.tree.way(other)[1:]]

    @property
    def inner(self) -> str:
        """The host that most others are reached through."""
        return max(self.mesh._hosts, key=lambda host: len(self.below(host)))

    def rank(self, host: str) -> int:
        return self.mesh._hosts.index(host)


@pytest.fixture
def tree(tmp_path: Path, agents: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch) -> Tree:
    caster, targets = client().hub._caster, client().runtime._targets
    # The agent of this machine may be there from earlier tests.
    others = {info.host for info in client().joined} - {client()._local.id}
    wait_until(lambda: {info.host for info in client().joined} <= {client()._local.id}, f"{others} have gone")
    monkeypatch.setenv("MONARCH_SLURM_MAX_CAST_FANOUT", str(FANOUT))
    monkeypatch.setattr(caster.tree, "fanout", FANOUT)
    monkeypatch.setattr(targets, "_fanout", FANOUT)
    publish(tmp_path / "job", address="127.0.0.1")
    act_as_another_machine(tmp_path / "job")
    quick = {"MONARCH_SLURM_HEARTBEAT_INTERVAL": "0.5"}
    started = [agents(tmp_path / "job", f"n{i}", quick) for i in range(HOSTS)]
    return Tree(gather_hosts([f"n{i}" for i in range(HOSTS)], timeout=DEADLINE), started)


def parts_of(logs: Any) -> list[Any]:
    return [logs, logs.slice(hosts=slice(0, 5)), logs.slice(hosts=slice(1, HOSTS, 2)), logs.slice(hosts=HOSTS - 1)]


def expected_of(parts: list[Any], sent: list[list[int]], rank: int) -> list[int]:
    return sorted(n for part, numbers in zip(parts, sent, strict=True) if rank in part._shape.ranks() for n in numbers)


def numbers_of(seen: list[Any], name: str) -> list[int]:
    return [number for sender, number in seen if sender == name]


def test_all_adverbs_slices_and_senders_keep_their_order(tree: Tree, failures: list[MeshFailure]) -> None:
    procs = tree.mesh.spawn_procs({"gpus": 2})
    logs: Any = procs.spawn("log", Log)
    callers: Any = procs.spawn("caller", Log)
    parts = parts_of(logs)
    casts = client().hub._caster._number
    remote = {
        name: callers.slice(hosts=host, gpus=gpu).tell.call_one(parts, name, 100, host)
        for name, host, gpu in [("first", 0, 0), ("inner", tree.rank(tree.inner), 1), ("leaf", HOSTS - 1, 0)]
    }
    sent: dict[str, list[list[int]]] = {}

    def speak(name: str, seed: int) -> None:
        sent[name] = talk(parts, name, 200, seed)

    threads = [threading.Thread(target=speak, args=(f"thread {i}", i)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE)
    sent.update({name: future.get(2 * DEADLINE) for name, future in remote.items()})
    for rank, seen in enumerate(logs.get.call().get(DEADLINE).values()):
        for name, numbers in sent.items():
            assert numbers_of(seen, name) == expected_of(parts, numbers, rank), (rank, name)
    wait_until(tree.whole, "all are linked, whatever a slow machine has cut")
    assert client().hub._caster._number > casts + 100, "casts go down the tree"
    casts = client().hub._caster._number
    procs.stop().get(DEADLINE)
    assert client().hub._caster._number == casts + 1, "so does a stop"
    assert not failures
    doomed = tree.mesh.spawn_procs()
    doomed.initialized.get(DEADLINE)
    casts = client().hub._caster._number
    doomed._kill()
    assert client().hub._caster._number == casts + 1, "and a kill"
    wait_until(lambda: sum(len(failure.crashed_ranks) for failure in failures) == HOSTS, "all have been killed")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_inner_host_that_is_lost_costs_nobody_else_a_message(
    tree: Tree, failures: list[MeshFailure], how: signal.Signals
) -> None:
    with configured(unresponsive_agent_timeout=1):
        lose_an_inner_host(tree, failures, how)


def lose_an_inner_host(tree: Tree, failures: list[MeshFailure], how: signal.Signals) -> None:
    logs: Any = tree.mesh.spawn_procs().spawn("log", Log)
    logs.get.call().get(DEADLINE)
    lost, pid = tree.rank(tree.inner), tree.agents[tree.inner].pid
    below = [tree.rank(host) for host in tree.below(tree.inner)]
    assert len(below) >= 2
    others = [rank for rank in range(HOSTS) if rank != lost]
    count = 300
    futures = []
    try:
        for number in range(count):
            logs.add.broadcast(("me", 2 * number))
            futures.append(logs.add.stream(("me", 2 * number + 1)))
            if number == count // 3:
                os.kill(pid, how)
        for answers in futures:
            errors = 0
            for answer in answers:
                error = answer.exception(DEADLINE)
                if error is not None:
                    assert isinstance(error, SupervisionError)
                    assert f"{tree.mesh.host_names[lost]}: " in str(error)
                    errors += 1
            assert errors <= 1
        assert errors == 1
        for rank in others:
            seen = logs.slice(hosts=rank).get.call_one().get(DEADLINE)
            assert numbers_of(seen, "me") == list(range(2 * count)), (rank, rank in below)
    finally:
        if how is signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    wait_until(lambda: failures)


def test_hosts_that_were_cut_off_are_linked_again(tree: Tree, failures: list[MeshFailure]) -> None:
    logs: Any = tree.mesh.spawn_procs().spawn("log", Log)
    logs.get.call().get(DEADLINE)
    hub, parts = client().hub, parts_of(logs)
    linked = [host for host in tree.mesh._hosts if tree.tree.linked(host)]
    done = threading.Event()
    sent: list[list[list[int]]] = []

    def speak() -> None:
        while not done.is_set():
            sent.append(talk(parts, f"{len(sent)}", 50, len(sent)))

    speaker = threading.Thread(target=speak)
    speaker.start()
    try:
        for host in linked:
            with hub._lock:
                hub._caster._links._states[host].wait = 1  # the next heartbeat is soon enough
                hub._caster._cut(host, "the test wants it")
        assert not tree.whole()
        wait_until(tree.whole, "all are linked again")
    finally:
        done.set()
        speaker.join(2 * DEADLINE)
    assert len(sent) > 1
    for rank, seen in enumerate(logs.get.call().get(DEADLINE).values()):
        for number, numbers in enumerate(sent):
            assert numbers_of(seen, f"{number}") == expected_of(parts, numbers, rank), (rank, number)
    assert not failures


def test_a_new_host_takes_the_place_of_a_lost_one(
    tree: Tree, agents: Callable[..., Agent], failures: list[MeshFailure], tmp_path: Path
) -> None:
    lost, there = tree.inner, len(client().joined)
    slot = tree.tree.slot(lost)
    os.kill(tree.agents[lost].pid, signal.SIGKILL)
    wait_until(lambda: len(client().joined) == there - 1)
    agents(tmp_path / "job", "new")
    new = gather_hosts(["new"], timeout=DEADLINE)._hosts[0]
    assert tree.tree.host(slot) == new
    hosts = [host for host in tree.mesh._hosts if host != lost]
    wait_until(lambda: all(tree.tree.linked(host) or tree.tree.parent(host) is None for host in [new, *hosts]))
    everybody = gather_hosts(["new", *(host.partition("#")[0] for host in hosts)], timeout=0)
    logs: Any = everybody.spawn_procs().spawn("log", Log)
    parts = [logs, logs.slice(hosts=slice(0, 4))]
    sent = talk(parts, "me", 50, 1)
    for rank, seen in enumerate(logs.get.call().get(DEADLINE).values()):
        assert numbers_of(seen, "me") == expected_of(parts, sent, rank)


def test_strangers_at_the_door_of_an_agent_get_nothing(tree: Tree, tmp_path: Path, failures: list[MeshFailure]) -> None:
    logs: Any = tree.mesh.spawn_procs().spawn("log", Log)
    logs.get.call().get(DEADLINE)
    invitation = read_invitation(tmp_path / "job" / "controller.json")
    (port,) = {
        c.laddr.port for c in psutil.Process(tree.agents[tree.inner].pid).net_connections("tcp") if c.status == "LISTEN"
    }
    at_door = replace(invitation, address=f"tcp://127.0.0.1:{port}", server_public=invitation.agent_public)
    other = JobKeys.make()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for keys, host, told in [
        (
            replace(at_door, agent_public=other.agent_public, agent_secret=other.agent_secret),
            "x#1",
            "did not prove that they hold this job's key",
        ),
        (at_door, "x#2", "not announced wants casts as x#2"),
    ]:
        dealer = make_dealer(context, host)
        connect_tcp(dealer, keys)
        dealer.send_multipart(encode(Message("below", Address(tree.inner, AGENT), Address(host, AGENT)), 0))
        wait_until(lambda told=told: told in tree.agents[tree.inner].text(), told)
    logs.add.call(1).get(DEADLINE)
    assert not dealer.poll(0)
    context.destroy(linger=0)
    assert logs.get.call().get(DEADLINE).values() == [[1]] * HOSTS
    assert not failures
