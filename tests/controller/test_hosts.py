"""Hosts that join through a job folder: all there, some missing, lost, given up, told to end."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from job_agents import Agent, Worker, act_as_another_machine
from support import DEADLINE, REPOSITORY, is_alive, wait_gone, wait_until

from monarch_slurm.actor import Actor, HostMesh, MeshFailure, SupervisionError, context, endpoint, this_host
from monarch_slurm.config import configured
from monarch_slurm.controller import (
    FolderError,
    HostsMissingError,
    gather_hosts,
    host_addresses,
    make_job_folder,
    publish,
    withdraw,
)
from monarch_slurm.host.procs import DESCRIPTORS_PER_PROC
from monarch_slurm.wire import BindError, read_invitation
from monarch_slurm.wire.limits import RESERVE

QUICK = {"MONARCH_SLURM_HEARTBEAT_INTERVAL": "0.5"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    publish(tmp_path / "job", address="127.0.0.1")
    return tmp_path / "job"


@pytest.fixture
def two(folder: Path, agents: Callable[..., Agent]) -> tuple[HostMesh, Agent, Agent]:
    one, other = agents(folder, "one"), agents(folder, "other")
    return gather_hosts(["one", "other"], timeout=DEADLINE), one, other


def test_hosts_come_in_the_order_of_their_names(
    two: tuple[HostMesh, Agent, Agent], failures: list[MeshFailure]
) -> None:
    hosts, one, other = two
    assert str(hosts.extent) == "{hosts: 2}"
    assert hosts.host_names == ["one", "other"]
    assert gather_hosts(["other", "one"], timeout=0).host_names == ["other", "one"]
    assert host_addresses(hosts) == ["127.0.0.1", "127.0.0.1"]
    procs = hosts.spawn_procs({"gpus": 2})
    assert str(procs.extent) == "{hosts: 2, gpus: 2}"
    workers: Any = procs.spawn("worker", Worker)
    pids = workers.pid.call().get(DEADLINE)
    assert set(pids.slice(hosts=0).values()) <= set(one.family())
    assert set(pids.slice(hosts=1).values()) <= set(other.family())
    caller = workers.slice(hosts=0, gpus=0)
    assert caller.call_other.call_one(workers.slice(hosts=1)).get(DEADLINE) == pids.slice(hosts=1).values()
    procs.stop().get(DEADLINE)
    assert not failures


def test_per_host_labels_must_be_new(two: tuple[HostMesh, Agent, Agent]) -> None:
    with pytest.raises(ValueError, match="overlap with host labels"):
        two[0].spawn_procs({"hosts": 2})


def test_hosts_that_are_missing_are_named(folder: Path, agents: Callable[..., Agent]) -> None:
    agents(folder, "present")
    gather_hosts(["present"], timeout=DEADLINE)
    with pytest.raises(HostsMissingError, match=r"1 of 3 hosts joined; missing: absent, gone \(gave up after 0.2 s\)"):
        gather_hosts(["absent", "present", "gone"], timeout=0.2)
    with pytest.raises(HostsMissingError, match=r"missing: absent \(the job has been cancelled\)"):
        gather_hosts(["absent"], still_hope=lambda: "the job has been cancelled")


def test_hosts_may_join_while_somebody_asks_whether_there_is_hope(folder: Path, agents: Callable[..., Agent]) -> None:
    asked, agent = threading.Event(), []

    def hope() -> None:
        if not asked.is_set():
            asked.set()
            agent.append(agents(folder, "late"))
            wait_until(lambda: _joined("late"))

    assert gather_hosts(["late"], timeout=DEADLINE, still_hope=hope).host_names == ["late"]


def _joined(name: str) -> bool:
    try:
        gather_hosts([name], timeout=0)
    except HostsMissingError:
        return False
    return True


def test_the_job_folder(tmp_path: Path) -> None:
    folder = make_job_folder(tmp_path / "a" / "b")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    make_job_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match="cannot use the folder"):
        make_job_folder(tmp_path / "file" / "c")
    with pytest.raises(BindError, match=r"cannot listen on tcp://192.0.2.1:\*"):
        publish(tmp_path / "d", address="192.0.2.1")


def test_an_agent_without_a_controller(tmp_path: Path, agents: Callable[..., Agent]) -> None:
    agent = agents(tmp_path, "lonely", {"MONARCH_SLURM_MESH_ORPHAN_TIMEOUT": "0.3"})
    assert agent.wait() == 1
    assert "error: host lonely: no controller published" in agent.text()
    assert "Traceback" not in agent.text()


def test_an_agent_whose_controller_is_no_more(folder: Path, tmp_path: Path, agents: Callable[..., Agent]) -> None:
    path = folder / "controller.json"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    invitation = replace(read_invitation(path), address=f"tcp://127.0.0.1:{port}", near=str(tmp_path / "nobody"))
    path.write_text(invitation.to_json())
    agent = agents(folder, "late", {**QUICK, "MONARCH_SLURM_MESH_ORPHAN_TIMEOUT": "0.5"})
    assert agent.wait() == 3
    assert "nothing heard from the controller" in agent.text()


def test_an_agent_that_may_not_trust_the_folder(folder: Path, agents: Callable[..., Agent]) -> None:
    (folder / "controller.json").chmod(0o644)
    agent = agents(folder, "careful")
    assert agent.wait() == 1
    assert "has mode 0644: others can reach it; refusing its keys" in agent.text()


@pytest.mark.parametrize("whom", ["agent", "guardian"])
def test_a_host_that_is_told_to_end_says_goodbye(
    two: tuple[HostMesh, Agent, Agent], failures: list[MeshFailure], whom: str
) -> None:
    hosts, one, other = two
    workers: Any = hosts.spawn_procs(name="w").spawn("worker", Worker)
    workers.slice(hosts=0).children.call_one().get(DEADLINE)
    family = one.family()
    os.kill(one.pid if whom == "agent" else one.process.pid, signal.SIGTERM)
    assert one.wait() == 0
    wait_gone(*family[1:])
    wait_until(lambda: failures)
    assert failures[0].host == "one"
    assert "the agent of its host was told to end by a signal" in failures[0].report()
    error = workers.pid.call().exception(DEADLINE)
    assert isinstance(error, SupervisionError)
    assert workers.slice(hosts=1).pid.call_one().get(DEADLINE) in other.family()
    with pytest.raises(HostsMissingError):
        gather_hosts(["one"], timeout=0)


def test_an_agent_that_dies_takes_everything_along(
    two: tuple[HostMesh, Agent, Agent], failures: list[MeshFailure]
) -> None:
    hosts, one, other = two
    workers: Any = hosts.spawn_procs(name="w").spawn("worker", Worker)
    workers.slice(hosts=0).children.call_one().get(DEADLINE)
    family = one.family()
    os.kill(one.pid, signal.SIGKILL)
    assert one.wait() == 137
    wait_gone(*family[1:])
    wait_until(lambda: failures)
    assert "the connection to its agent is gone" in failures[0].report()
    assert workers.slice(hosts=1).pid.call_one().get(DEADLINE) in other.family()
    late = hosts.slice(hosts=0).spawn_procs()
    assert isinstance(late.initialized.exception(DEADLINE), SupervisionError)


def test_a_host_that_was_given_up_is_fenced(
    folder: Path, agents: Callable[..., Agent], failures: list[MeshFailure]
) -> None:
    act_as_another_machine(folder)
    one, _ = agents(folder, "one"), agents(folder, "other")
    hosts = gather_hosts(["one", "other"], timeout=DEADLINE)
    workers: Any = hosts.spawn_procs(name="w").spawn("worker", Worker)
    pids = workers.pid.call().get(DEADLINE).values()
    agent = one.pid
    family = one.family()
    os.kill(agent, signal.SIGSTOP)
    try:
        with configured(unresponsive_agent_timeout=1):
            pending = workers.slice(hosts=0).pid.call_one()
            error = pending.exception(DEADLINE)
        assert "one: its agent said nothing for 1 s" in str(error)
        wait_until(lambda: failures)
        assert is_alive(pids[0])
        # The survivors can do without it, and know.
        told = workers.slice(hosts=1).call_other.call_one(workers.slice(hosts=0)).exception(DEADLINE)
        assert "its agent said nothing for 1 s" in str(told)
    finally:
        os.kill(agent, signal.SIGCONT)
    assert one.wait() == 4
    assert one.text().count("the controller gave this host up") == 1
    wait_gone(*family[1:])
    assert len(failures) == 1
    with pytest.raises(HostsMissingError):
        gather_hosts(["one"], timeout=0)


def test_a_new_agent_of_the_old_name_is_another_host(
    two: tuple[HostMesh, Agent, Agent], folder: Path, agents: Callable[..., Agent], failures: list[MeshFailure]
) -> None:
    hosts, one, _ = two
    os.kill(one.pid, signal.SIGTERM)
    one.wait()
    agents(folder, "one")
    again = gather_hosts(["one"], timeout=DEADLINE)
    assert again.host_names == ["one"]
    assert again != hosts.slice(hosts=slice(0, 1))
    procs = again.spawn_procs()
    assert procs.initialized.get(DEADLINE)
    procs.stop().get(DEADLINE)
    assert isinstance(hosts.slice(hosts=0).spawn_procs().initialized.exception(DEADLINE), SupervisionError)


def test_shutdown_of_hosts(two: tuple[HostMesh, Agent, Agent], failures: list[MeshFailure]) -> None:
    hosts, one, other = two
    workers: Any = hosts.spawn_procs().spawn("worker", Worker)
    workers.pid.call().get(DEADLINE)
    families = one.family()[1:] + other.family()[1:]
    with pytest.raises(RuntimeError, match="through a slice"):
        hosts.slice(hosts=0).shutdown()
    hosts.shutdown().get(DEADLINE)
    assert one.wait() == other.wait() == 0
    wait_gone(*families)
    with pytest.raises(RuntimeError, match="HostMesh has already been shut down"):
        hosts.spawn_procs()
    assert not failures


def test_stop_of_hosts_ends_procs_and_leaves_the_hosts(
    two: tuple[HostMesh, Agent, Agent], failures: list[MeshFailure]
) -> None:
    hosts, one, other = two
    workers: Any = hosts.spawn_procs({"n": 2}).spawn("worker", Worker)
    elsewhere: Any = this_host().spawn_procs().spawn("worker", Worker)
    pids = workers.pid.call().get(DEADLINE).values()
    here = elsewhere.pid.call_one().get(DEADLINE)
    with pytest.raises(RuntimeError, match="cannot stop hosts through a slice"):
        hosts.slice(hosts=0).stop()
    hosts.stop().get(DEADLINE)
    wait_gone(*pids)
    assert elsewhere.pid.call_one().get(DEADLINE) == here
    error = workers.pid.call().exception(DEADLINE)
    assert isinstance(error, SupervisionError)
    again: Any = hosts.spawn_procs().spawn("worker", Worker)
    assert set(again.pid.call().get(DEADLINE).values()) <= {*one.family(), *other.family()}
    hosts.stop().get(DEADLINE)
    hosts.stop().get(DEADLINE)
    assert not failures


CONTROLLER = """
    import sys, threading
    from pathlib import Path
    from monarch_slurm.actor import Actor, endpoint
    import monarch_slurm.host.hub as hub
    from monarch_slurm.controller import gather_hosts, publish, withdraw
    if sys.argv[2] != "beside":
        hub.pid_space = lambda: "another machine"  # whose agents cannot see this process end
    class Worker(Actor):
        @endpoint
        def get(self): return 1
    if __name__ == "__main__":
        folder = Path(sys.argv[1])
        publish(folder, address="127.0.0.1")
        gather_hosts(["far"], timeout=30).spawn_procs({"n": 2}).spawn("w", Worker).get.call().get(30)
        if sys.argv[2] == "withdraw":
            withdraw(folder)
        print("ready", flush=True)
        threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("leave", "lease", "text"),
    [
        ("beside", "60", "the controller has ended"),
        ("withdraw", "60", "the controller has ended"),
        ("keep", "1", "nothing heard from the controller for"),
    ],
)
def test_agents_end_when_their_controller_is_killed(
    tmp_path: Path, agents: Callable[..., Agent], leave: str, lease: str, text: str
) -> None:
    script = tmp_path / "controller.py"
    script.write_text(textwrap.dedent(CONTROLLER))
    environment = {
        **os.environ, **QUICK, "PYTHONPATH": str(REPOSITORY), "MONARCH_SLURM_MESH_ORPHAN_TIMEOUT": lease,
    }  # fmt: skip
    job = tmp_path / "job"
    controller = subprocess.Popen(
        [sys.executable, str(script), str(job), leave], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        agent = agents(job, "far")
        assert controller.stdout is not None
        assert controller.stdout.readline() == "ready\n"
        family = agent.family()
        assert len(family) >= 5
    finally:
        controller.kill()
        controller.communicate()
    assert agent.wait() == 3
    assert text in agent.text()
    wait_gone(*family[1:])


def test_withdraw_twice(folder: Path) -> None:
    withdraw(folder)
    withdraw(folder)
    assert not (folder / "controller.json").exists()


# ---- limits


def test_an_agent_without_descriptors_says_what_to_raise(
    two: tuple[HostMesh, Agent, Agent], failures: list[MeshFailure]
) -> None:
    hosts, one, _ = two
    some: Any = hosts.spawn_procs(name="before").spawn("worker", Worker)
    some.pid.call().get(DEADLINE)
    _, hard = resource.prlimit(one.pid, resource.RLIMIT_NOFILE)
    room = len(os.listdir(f"/proc/{one.pid}/fd")) + RESERVE + 3 * DESCRIPTORS_PER_PROC
    resource.prlimit(one.pid, resource.RLIMIT_NOFILE, (room, hard))
    procs = hosts.spawn_procs({"n": 12}, name="many")
    error = procs.initialized.exception(DEADLINE)
    assert "host one" in str(error)
    assert f"of {room} file descriptors are in use" in str(error)
    assert f"ulimit -n {hard}" in str(error)
    assert some.pid.call().get(DEADLINE)  # what ran goes on
    resource.prlimit(one.pid, resource.RLIMIT_NOFILE, (hard, hard))
    assert hosts.spawn_procs({"n": 2}).initialized.get(DEADLINE)


def test_a_controller_without_descriptors_says_what_to_raise(
    folder: Path, agents: Callable[..., Agent], caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    agents(folder, "present")
    gather_hosts(["present"], timeout=DEADLINE)
    late = agents(folder, "late")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_first_free_descriptor(), hard))
        with caplog.at_level(logging.ERROR, "monarch_slurm"):
            wait_until(lambda: "cannot take another host's connection" in caplog.text)
        assert "each host takes one. Raise the limit" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert gather_hosts(["late"], timeout=DEADLINE).host_names == ["late"]
    assert is_alive(late.pid)


def _first_free_descriptor() -> int:
    with open("/dev/null") as null:
        return null.fileno()


# ---- news


class Watcher(Actor):
    @endpoint
    def call(self, whom: Any) -> list[int]:
        values: list[int] = whom.pid.call().get().values()
        return values

    @endpoint
    def fails(self, whom: Any) -> str:
        return str(whom.pid.call().exception(DEADLINE))

    @endpoint
    def ended(self) -> int:
        return len(context().actor_instance.runtime._ends._procs)

    def __supervise__(self, failure: MeshFailure) -> bool:
        return True


def test_news_of_an_end_goes_to_those_who_had_to_do_with_it(
    folder: Path, agents: Callable[..., Agent], failures: list[MeshFailure]
) -> None:
    for name in ("one", "near", "far"):
        agents(folder, name)
    hosts = gather_hosts(["one", "near", "far"], timeout=DEADLINE)
    workers: Any = hosts.slice(hosts=0).spawn_procs({"n": 2}).spawn("worker", Worker)
    near: Any = hosts.slice(hosts=1).spawn_procs().spawn("near", Watcher)
    far: Any = hosts.slice(hosts=2).spawn_procs().spawn("far", Watcher)
    pids = near.call.call_one(workers).get(DEADLINE)
    assert far.ended.call_one().get(DEADLINE) == 0
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: failures)
    wait_until(lambda: near.ended.call_one().get(DEADLINE) == 1)
    assert far.ended.call_one().get(DEADLINE) == 0
    # Who asks later is told then.
    assert "Killed(sig=9)" in far.fails.call_one(workers.slice(n=0)).get(DEADLINE)
    assert far.call.call_one(workers.slice(n=1)).get(DEADLINE) == pids[1:]
