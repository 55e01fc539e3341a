"""Actors and procs that fail: what callers see, what owners are told, what goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from recorded_faults import Faults
from sample_actors import AsyncLog, AsyncParent, BadInit, Caller, Dier, Log, Parent
from support import DEADLINE, wait_gone, wait_until

from monarch_slurm.actor import (
    Actor,
    ActorError,
    Channel,
    MeshFailure,
    ProcMesh,
    SupervisionError,
    context,
    endpoint,
    send,
    this_host,
)


def test_init_that_raises(grid: ProcMesh, faults: Faults) -> None:
    bad: Any = grid.spawn("bad", BadInit)
    error = bad.get.call().exception(DEADLINE)
    assert isinstance(error, SupervisionError)
    assert str(error).startswith("Endpoint call bad.get() failed, The actor <root>.<sample_actors.BadInit bad{'x': ")
    assert "and all its descendants have failed: actor explicitly aborted due to: Traceback" in str(error)
    assert "ValueError: no good init" in str(error)
    with pytest.raises(SupervisionError, match="no good init"):
        bad.initialized.get(DEADLINE)
    failures = faults.wait(4)
    assert sorted(failure.crashed_ranks for failure in failures) == [(0,), (1,), (2,), (3,)]
    assert {failure.mesh_name for failure in failures} == {bad._name.get()}
    assert all("ValueError: no good init" in (failure.traceback or "") for failure in failures)
    assert all(failure.host and failure.pid and failure.detected_at for failure in failures)


def test_init_that_raises_on_one_rank_leaves_the_others(grid: ProcMesh, faults: Faults) -> None:
    bad: Any = grid.spawn("bad", BadInit, [1])
    faults.wait()
    assert bad.slice(x=1).get.call().get(DEADLINE).values() == ["fine"] * 2
    assert isinstance(bad.get.call().exception(DEADLINE), SupervisionError)
    again: Any = grid.spawn("good", BadInit, [])
    assert again.get.call().get(DEADLINE).values() == ["fine"] * 4
    for mesh in (bad, again):
        mesh.stop().get(DEADLINE)


@pytest.mark.parametrize("kind", [Log, AsyncLog])
def test_an_exception_that_nobody_waits_for_fails_the_actor(grid: ProcMesh, faults: Faults, kind: type[Any]) -> None:
    logs: Any = grid.spawn("log", kind)
    logs.slice(x=0, y=1).fail.broadcast()
    (failure,) = faults.wait()
    assert failure.crashed_ranks == (1,)
    assert "ValueError: on purpose" in failure.report()
    assert str(failure).startswith(
        f"MeshFailure(mesh_name={logs._name.get()}, crashed_ranks=[1], event=Supervision event:"
    )
    error = logs.slice(x=0, y=1).add.call_one(1).exception(0.5)
    assert isinstance(error, SupervisionError)
    assert isinstance(logs.add.call(1).exception(DEADLINE), SupervisionError)
    assert logs.slice(x=1).add.call(1).get(DEADLINE).values() == [1, 1]
    logs.stop().get(DEADLINE)
    assert len(faults.failures) == 1


def test_other_procs_hear_of_an_actor_that_has_failed(grid: ProcMesh, faults: Faults) -> None:
    logs: Any = grid.slice(x=0, y=0).spawn("log", Log)
    caller: Any = grid.slice(x=1, y=1).spawn("caller", Caller)
    logs.fail.broadcast()
    faults.wait()
    error = caller.call.call_one(logs, 1).exception(DEADLINE)
    assert isinstance(error, ActorError)
    assert isinstance(error.exception, SupervisionError)
    assert "on purpose" in str(error)


def test_a_base_exception_fails_the_actor(grid: ProcMesh, faults: Faults) -> None:
    logs: Any = grid.slice(x=0, y=0).spawn("log", Log)
    error = logs.fail_as.call_one("base").exception(DEADLINE)
    assert isinstance(error, SupervisionError)
    assert "SpecialExit: base" in str(error)
    async_log: Any = grid.slice(x=0, y=0).spawn("log", AsyncLog)
    error = async_log.cancelled.call_one().exception(DEADLINE)
    assert isinstance(error, SupervisionError)
    assert "CancelledError" in str(error)
    faults.wait(2)


def test_an_exception_out_of_an_explicit_endpoint_fails_the_actor(grid: ProcMesh, faults: Faults) -> None:
    log: Any = grid.slice(x=0, y=0).spawn("log", AsyncLog)
    error = log.fail_explicit.call_one().exception(DEADLINE)
    assert isinstance(error, SupervisionError)
    assert "out of an explicit endpoint" in str(error)
    faults.wait()


def test_a_message_without_a_port_to_a_failed_actor_is_no_second_failure(grid: ProcMesh, faults: Faults) -> None:
    log: Any = grid.slice(x=0, y=0).spawn("log", Log)
    log.fail.broadcast()
    faults.wait()
    for _ in range(10):
        log.add.broadcast(1)
        send(log.add, (1,), {})
    assert isinstance(log.add.call_one(1).exception(DEADLINE), SupervisionError)
    other: Any = grid.slice(x=0, y=0).spawn("other", Log)
    assert other.add.call_one(1).get(DEADLINE) == 1
    assert len(faults.failures) == 1


def test_kill_from_inside_carries_its_reason(grid: ProcMesh, faults: Faults) -> None:
    class Aborter(Actor):
        @endpoint
        def abort(self, reason: str | None) -> None:
            context().actor_instance.abort(reason)

        @endpoint
        def stop_myself(self) -> None:
            context().actor_instance.stop("enough")

        @endpoint
        def get(self) -> int:
            return 1

    aborter: Any = grid.slice(x=0, y=0).spawn("aborter", Aborter)
    aborter.abort.broadcast("because")
    assert "because" in faults.wait()[0].report()
    nameless: Any = grid.slice(x=0, y=0).spawn("aborter", Aborter)
    nameless.abort.broadcast(None)
    assert "no reason provided" in faults.wait(2)[1].report()
    stopper: Any = grid.slice(x=0, y=0).spawn("aborter", Aborter)
    stopper.stop_myself.call_one().get(DEADLINE)
    assert "stopped: enough" in str(stopper.get.call_one().exception(DEADLINE))
    assert len(faults.failures) == 2


DEATHS = [
    ("exit", "Exited(code=3)"),
    ("sigkill", "Killed(sig=9)"),
    ("sigsegv", "Killed(sig=11"),
    ("abort", "Killed(sig=6"),
]


@pytest.mark.parametrize(("how", "exit_text"), DEATHS)
def test_the_death_of_a_proc(spawn: Callable[..., ProcMesh], faults: Faults, how: str, exit_text: str) -> None:
    mesh = spawn(per_host={"n": 3}, name="mortal")
    diers: Any = mesh.spawn("dier", Dier)
    pids = diers.pid.call().get(DEADLINE).values()
    error = diers.slice(n=1).die.call_one(how).exception(DEADLINE)
    assert isinstance(error, SupervisionError)
    text = str(error)
    for part in (
        "Endpoint call dier.die() failed",
        "<root>.<sample_actors.Dier dier{'n': 1/3}>",
        "the process this actor was running on failed",
        exit_text,
        f"host {os.uname().nodename}",
        f"proc {mesh._layout.mesh}.1",
        "rank 1",
        f"pid {pids[1]}",
        f"about to {how}",
    ):
        assert part in text
    if how == "sigsegv":
        assert "segmentation fault in native code" in text
        assert "in die" in text, "faulthandler's Python stack"
    (failure,) = faults.wait()
    assert failure.crashed_ranks == (1,)
    assert failure.mesh_name == diers._name.get()
    assert failure.exit is not None
    assert failure.exit.startswith(exit_text)
    assert failure.pid == pids[1]
    assert any(f"about to {how}" in line for line in failure.stderr_tail)
    # A new call fails at once, and what does not need the dead rank goes on.
    assert isinstance(diers.get.call().exception(0.5), SupervisionError)
    assert isinstance(diers.slice(n=1).get.call_one().exception(0.5), SupervisionError)
    assert diers.slice(n=slice(0, 3, 2)).get.call().get(DEADLINE).values() == ["alive"] * 2
    late: Any = mesh.slice(n=1).spawn("late", Dier)
    assert isinstance(late.get.call_one().exception(DEADLINE), SupervisionError)
    assert isinstance(late.initialized.exception(DEADLINE), SupervisionError)


def test_a_proc_that_is_killed_from_outside(spawn: Callable[..., ProcMesh], faults: Faults) -> None:
    logs: Any = spawn(per_host={"n": 2}).spawn("log", Log)
    pids = logs.pid.call().get(DEADLINE).values()
    waiting = logs.sleep.call(1000)
    os.kill(pids[0], signal.SIGKILL)
    assert "Killed(sig=9)" in str(waiting.exception(DEADLINE))
    os.kill(pids[1], signal.SIGKILL)
    faults.wait(2)


def test_what_reached_the_agent_before_a_death_is_told_before_the_death(
    spawn: Callable[..., ProcMesh], faults: Faults
) -> None:
    for round_number in range(5):
        dier: Any = spawn().spawn("dier", Dier)
        port, receiver = Channel.open()
        dier.send_and_die.broadcast(port, 2000)
        faults.wait(round_number + 1)
        seen = []
        while (number := _next(receiver)) is not None:
            seen.append(number)
        # The kill may come before ZeroMQ has written the last of them. None may be missing in between, or come later.
        assert seen == list(range(len(seen)))
        assert receiver.recv().exception(0.05) is not None


def _next(receiver: Any) -> int | None:
    try:
        return int(receiver.recv().get(0))
    except TimeoutError:
        return None


def test_kill_of_a_mesh_that_was_just_asked_for_is_a_failure(spawn: Callable[..., ProcMesh], faults: Faults) -> None:
    mesh = spawn(per_host={"n": 2})
    mesh._kill()
    assert isinstance(mesh.initialized.exception(DEADLINE), SupervisionError)
    assert {failure.exit for failure in faults.wait(2)} == {"Killed(sig=9)"}


def test_children_of_a_dead_proc_are_gone_however_they_were_started(
    spawn: Callable[..., ProcMesh], faults: Faults
) -> None:
    dier: Any = spawn().spawn("dier", Dier)
    children = dier.start_children.call_one().get(DEADLINE)
    wait_until(lambda: all(os.path.exists(f"/proc/{pid}") for pid in children))
    dier.die.broadcast("exit")
    faults.wait()
    wait_gone(*children)


def test_an_orphan_of_a_living_proc_lives_on(spawn: Callable[..., ProcMesh], faults: Faults) -> None:
    one: Any = spawn().spawn("dier", Dier)
    other: Any = spawn().spawn("dier", Dier)
    children = one.start_children.call_one().get(DEADLINE)
    other.die.broadcast("exit")
    faults.wait()
    assert isinstance(other.get.call_one().exception(DEADLINE), SupervisionError)
    third: Any = spawn().spawn("log", Log)
    third.pid.call_one().get(DEADLINE)
    assert all(os.path.exists(f"/proc/{pid}") for pid in children)
    one.die.broadcast("sigkill")
    faults.wait(2)
    wait_gone(*children)


# ---- supervision


@pytest.mark.parametrize("kind", [Parent, AsyncParent])
def test_supervise_that_handles(grid: ProcMesh, kind: type[Any]) -> None:
    parent: Any = grid.slice(x=0, y=0).spawn("parent", *_arguments(kind, "handle"))
    (pid,) = parent.start.call_one().get(DEADLINE)
    os.kill(pid, signal.SIGKILL)
    (told,) = wait_until(lambda: parent.told.call_one().get(DEADLINE))
    assert "Killed(sig=9)" in told
    assert f"pid {pid}" in told
    (again,) = parent.start.call_one().get(DEADLINE)
    assert again != pid
    parent.stop().get(DEADLINE)
    wait_gone(again)


def _arguments(kind: type[Any], behaviour: str) -> tuple[Any, ...]:
    return (Parent, "", behaviour) if kind is Parent else (AsyncParent, behaviour)


@pytest.mark.parametrize("kind", [Parent, AsyncParent])
@pytest.mark.parametrize("behaviour", ["refuse", "raise"])
def test_what_is_not_handled_fails_the_owner(grid: ProcMesh, faults: Faults, kind: type[Any], behaviour: str) -> None:
    parent: Any = grid.slice(x=0, y=0).spawn("parent", *_arguments(kind, behaviour))
    (pid,) = parent.start.call_one().get(DEADLINE)
    os.kill(pid, signal.SIGKILL)
    (failure,) = faults.wait()
    assert failure.mesh_name == parent._name.get()
    report = failure.report()
    assert "Killed(sig=9)" in report
    assert "<sample_actors.Log child{'n': 0/1}>" in report
    assert ("ErrorDuringHandlingSupervision" in report) == (behaviour == "raise")
    assert ("raised while it supervised" in report) == (behaviour == "raise")
    error = parent.told.call_one().exception(DEADLINE)
    assert isinstance(error, SupervisionError)


def test_a_failure_climbs_as_far_as_it_is_handled(grid: ProcMesh) -> None:
    class Grandparent(Actor):
        def __init__(self) -> None:
            self.failures: list[str] = []

        @endpoint
        def start(self) -> list[int]:
            self.procs = this_host().spawn_procs(name="middle")
            self.parent: Any = self.procs.spawn("parent", Parent, "", "refuse")
            return self.parent.start.call_one().get()

        @endpoint
        def told(self) -> list[str]:
            return self.failures

        def __supervise__(self, failure: MeshFailure) -> bool:
            self.failures.append(failure.report())
            return True

    top: Any = grid.slice(x=0, y=0).spawn("top", Grandparent)
    (pid,) = top.start.call_one().get(DEADLINE)
    os.kill(pid, signal.SIGKILL)
    (told,) = wait_until(lambda: top.told.call_one().get(DEADLINE))
    assert "parent{}" in told
    assert "child{'n': 0/1}" in told
    assert "Killed(sig=9)" in told
    top.stop().get(DEADLINE)


def test_a_failure_that_the_owner_met_in_a_call_reaches_supervise_too(grid: ProcMesh) -> None:
    parent: Any = grid.slice(x=0, y=0).spawn("parent", Parent, "", "handle")
    (pid,) = parent.start.call_one().get(DEADLINE)
    os.kill(pid, signal.SIGKILL)
    assert "Killed(sig=9)" in parent.ask_children.call_one().get(DEADLINE)
    assert len(wait_until(lambda: parent.told.call_one().get(DEADLINE))) == 1
    parent.stop().get(DEADLINE)


def test_a_mesh_never_outlives_its_owner_s_failure(grid: ProcMesh, faults: Faults) -> None:
    parent: Any = grid.slice(x=0, y=0).spawn("parent", Parent)
    pids = parent.start.call_one(2).get(DEADLINE)
    children = parent.mesh.call_one().get(DEADLINE)
    children.slice(n=0).fail.broadcast()
    faults.wait()
    wait_gone(*pids)


def test_a_mesh_never_outlives_its_owner_s_process(spawn: Callable[..., ProcMesh], faults: Faults) -> None:
    mesh = spawn()
    parent: Any = mesh.spawn("parent", Parent)
    pids = parent.start.call_one(2).get(DEADLINE)
    children = parent.mesh.call_one().get(DEADLINE)
    mesh._kill()
    faults.wait()
    wait_gone(*pids)
    assert isinstance(children.pid.call().exception(DEADLINE), SupervisionError)


def test_an_actor_on_procs_of_others_ends_with_its_owners_process(
    grid: ProcMesh, spawn: Callable[..., ProcMesh], faults: Faults
) -> None:
    mesh = spawn()
    caller: Any = mesh.spawn("caller", Caller)
    logs = caller.spawn_on.call_one(grid, "x").get(DEADLINE)
    assert logs.get.call().get(DEADLINE).values() == [["x"]] * 4
    mesh._kill()
    faults.wait()
    error = wait_until(lambda: logs.get.call().exception(DEADLINE))
    assert "its owner is gone" in str(error)
