"""Each way of failing has its kind, whoever is told: the program, an actor of another process, of another host."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job_agents import Agent
from recorded_faults import Faults
from support import DEADLINE

from monarch_slurm.actor import (
    Actor,
    BootstrapCommand,
    Channel,
    FailureKind,
    HostMesh,
    MeshFailure,
    Port,
    ProcMesh,
    RestartPolicy,
    UndeliverableMessageEnvelope,
    context,
    endpoint,
    this_host,
    this_proc,
)
from monarch_slurm.controller import gather_hosts, publish


class Failing(Actor):
    """Fails in the way that it is told to."""

    def __init__(self, how: str = "") -> None:
        self.how = how
        if how == "init":
            raise ValueError("no good init")

    @endpoint
    def ready(self) -> bool:
        return True

    @endpoint
    def fail(self) -> None:
        if self.how == "abort":
            context().actor_instance.abort("no more")
        elif self.how == "exit":
            raise SystemExit(3)
        elif self.how == "child":
            self.child = this_proc().spawn("child", Failing, "error")
            self.child.fail.broadcast()
        elif self.how == "undelivered":
            procs = this_host().spawn_procs(name="deaf")
            deaf: Any = procs.spawn("deaf", Failing)
            deaf.ready.call_one().get()
            procs.stop().get()
            deaf.fail.broadcast()
        elif self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how == "end":
            os._exit(0)
        elif self.how.startswith("cleanup"):
            context().actor_instance.stop()
        else:
            raise ValueError("on purpose")

    def __cleanup__(self, error: Exception | None) -> None:
        if self.how == "cleanup":
            raise ValueError("no good cleanup")
        if self.how == "cleanup that hangs":
            threading.Event().wait()

    def _handle_undeliverable_message(self, message: UndeliverableMessageEnvelope) -> bool:
        return False


class AsyncFailing(Actor):
    def __init__(self, how: str) -> None:
        self.how = how

    @endpoint
    async def fail(self) -> None:
        if self.how == "abort":
            context().actor_instance.abort("no more")
        elif self.how.startswith("cleanup"):
            context().actor_instance.stop()
        else:
            raise ValueError("on purpose")

    async def __cleanup__(self, error: Exception | None) -> None:
        if self.how == "cleanup":
            raise ValueError("no good cleanup")
        if self.how == "cleanup that hangs":
            await asyncio.Event().wait()


class Owner(Actor):
    """Has others fail, and hands on what it hears."""

    def __init__(self, told: Port[MeshFailure]) -> None:
        self.told = told

    @endpoint
    def have_fail(self, hosts: HostMesh, kind: type[Actor], how: str, **options: Any) -> list[int]:
        procs = hosts.spawn_procs(name="failing", **options)
        self.failing: Any = procs.spawn("failing", kind, how)
        self.failing.fail.broadcast()
        return list(self.failing._ref.shape.ranks())

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.told.send(failure)
        return True


KINDS = [
    (Failing, "init", FailureKind.ACTOR_ERROR),
    (Failing, "error", FailureKind.ACTOR_ERROR),
    (Failing, "exit", FailureKind.ACTOR_ERROR),
    (Failing, "abort", FailureKind.ACTOR_ABORTED),
    (Failing, "child", FailureKind.CHILD_FAILED),
    (Failing, "undelivered", FailureKind.MESSAGE_UNDELIVERED),
    (Failing, "cleanup", FailureKind.CLEANUP_FAILED),
    (Failing, "cleanup that hangs", FailureKind.STOP_TIMEOUT),
    (Failing, "kill", FailureKind.PROC_EXITED),
    (Failing, "end", FailureKind.PROC_EXITED),
    (AsyncFailing, "error", FailureKind.ACTOR_ERROR),
    (AsyncFailing, "abort", FailureKind.ACTOR_ABORTED),
    (AsyncFailing, "cleanup", FailureKind.CLEANUP_FAILED),
    (AsyncFailing, "cleanup that hangs", FailureKind.STOP_TIMEOUT),
]


@pytest.fixture
def told(grid: ProcMesh) -> tuple[Any, Any]:
    port, receiver = Channel.open()
    return grid.slice(x=0, y=0).spawn("owner", Owner, port), receiver


@pytest.mark.parametrize(("actor", "how", "kind"), KINDS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_failure_has_its_kind(
    told: tuple[Any, Any], actor: type[Actor], how: str, kind: FailureKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONARCH_SLURM_CLEANUP_TIMEOUT", "0.5")
    owner, receiver = told
    owner.have_fail.call_one(this_host(), actor, how, env={"MONARCH_SLURM_CLEANUP_TIMEOUT": "0.5"}).get(DEADLINE)
    failure = receiver.recv().get(DEADLINE)
    assert failure.kind is kind, failure
    owner.stop().get(DEADLINE)


@pytest.mark.parametrize("how", ["init", "error", "abort", "kill"])
def test_a_restart_keeps_the_kind(told: tuple[Any, Any], how: str) -> None:
    owner, receiver = told
    policy = RestartPolicy("one_for_one", max_restarts=1)
    owner.have_fail.call_one(this_host(), Failing, how, restart=policy).get(DEADLINE)
    failure = receiver.recv().get(DEADLINE)
    assert failure.restarted
    assert failure.kind is next(kind for _, name, kind in KINDS if name == how), failure
    owner.stop().get(DEADLINE)


def test_a_program_that_cannot_be_run_starts_no_proc(spawn: Callable[..., ProcMesh], faults: Faults) -> None:
    spawn(bootstrap_command=BootstrapCommand(program="/nowhere/python"))
    assert faults.wait()[0].kind is FailureKind.PROC_NOT_STARTED


def test_a_lost_host_is_told_from_an_actor_that_aborts(
    told: tuple[Any, Any], agents: Callable[..., Agent], tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    publish(folder, address="127.0.0.1")
    agent = agents(folder, "one")
    hosts = gather_hosts(["one"], timeout=DEADLINE)
    owner, receiver = told
    owner.have_fail.call_one(hosts, Failing, "abort").get(DEADLINE)
    failure = receiver.recv().get(DEADLINE)
    assert failure.kind is FailureKind.ACTOR_ABORTED
    assert failure.host == "one"
    os.kill(agent.pid, signal.SIGKILL)
    failure = receiver.recv().get(DEADLINE)
    assert failure.kind is FailureKind.HOST_LOST, failure
    owner.stop().get(DEADLINE)
