"""_handle_undeliverable_message: an actor is told of messages without an answer that came to nobody."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from recorded_faults import Faults
from support import DEADLINE, hold, wait_until

from monarch_slurm.actor import (
    Actor,
    Channel,
    ProcMesh,
    SupervisionError,
    UndeliverableMessageEnvelope,
    endpoint,
    send,
)


class Target(Actor):
    def __init__(self, fail: bool = False) -> None:
        if fail:
            raise ValueError("no good init")
        self.seen: list[int] = []

    @endpoint
    def put(self, number: int) -> int:
        self.seen.append(number)
        return number

    @endpoint
    def get(self) -> list[int]:
        return self.seen

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Opener(Actor):
    """Opens channels in its own process."""

    def __init__(self) -> None:
        self.receivers: list[Any] = []

    @endpoint
    def open(self) -> Any:
        port, receiver = Channel.open()
        self.receivers.append(receiver)
        return port

    @endpoint
    def received(self) -> Any:
        return self.receivers[-1].recv().get(DEADLINE)

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Sender(Actor):
    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.told: list[tuple[str, str, str]] = []

    @endpoint
    def put(self, target: Any, number: int, port: Any = None) -> None:
        if port is not None:
            send(target.put, (number,), {}, port)
        else:
            target.put.broadcast(number)

    @endpoint
    def say(self, port: Any, value: object, wants_to_know: bool = True) -> None:
        port.return_undeliverable = wants_to_know
        port.send(value)

    @endpoint
    def heard(self) -> list[tuple[str, str, str]]:
        return self.told

    def _handle_undeliverable_message(self, message: UndeliverableMessageEnvelope) -> bool:
        self.told.append((message.sender(), message.dest(), message.error_msg()))
        if self.answer == "raise":
            raise RuntimeError("raised while it was told")
        return self.answer == "drop"


class AsyncSender(Actor):
    def __init__(self) -> None:
        self.told: list[tuple[str, str, str]] = []

    @endpoint
    async def put(self, target: Any, number: int) -> None:
        target.put.broadcast(number)

    @endpoint
    async def heard(self) -> list[tuple[str, str, str]]:
        return self.told

    async def _handle_undeliverable_message(self, message: UndeliverableMessageEnvelope) -> bool:
        await asyncio.sleep(0)
        self.told.append((message.sender(), message.dest(), message.error_msg()))
        return True


def heard(sender: Any, count: int) -> list[tuple[str, str, str]]:
    told: list[tuple[str, str, str]] = wait_until(
        lambda: len(got := sender.heard.call_one().get(DEADLINE)) >= count and got, f"{count} messages come back"
    )
    assert len(told) == count
    return told


@pytest.mark.parametrize("kind", [Sender, AsyncSender])
def test_a_message_to_an_actor_that_has_ended(grid: ProcMesh, kind: type[Any]) -> None:
    arguments = ["drop"] if kind is Sender else []
    sender: Any = grid.slice(x=0, y=0).spawn("sender", kind, *arguments)
    targets: Any = grid.slice(x=1).spawn("targets", Target)
    sender.put.call_one(targets, 1).get(DEADLINE)
    assert targets.get.call().get(DEADLINE).values() == [[1], [1]]
    targets.slice(y=1).stop().get(DEADLINE)
    sender.put.call_one(targets, 2).get(DEADLINE)
    ((who, whom, why),) = heard(sender, 1)
    assert kind.__name__ in who
    assert "Target targets{'y': 1/2}" in whom
    assert whom.endswith(".put()")
    assert "stopped" in why
    assert targets.slice(y=0).get.call_one().get(DEADLINE) == [1, 2]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_message_to_a_process_that_is_killed(
    grid: ProcMesh, spawn: Callable[..., ProcMesh], faults: Faults, when: str
) -> None:
    sender: Any = grid.slice(x=0, y=0).spawn("sender", Sender, "drop")
    target: Any = spawn(name="doomed").spawn("target", Target)
    pid = target.pid.call_one().get(DEADLINE)
    if when == "before":  # a process that is held takes nothing in
        hold(pid)
    else:
        os.kill(pid, signal.SIGKILL)
        assert isinstance(target.get.call_one().exception(DEADLINE), SupervisionError)
    port, _ = Channel.open()
    sender.put.call_one(target, 1).get(DEADLINE)
    sender.put.call_one(target, 2, port).get(DEADLINE)
    if when == "before":
        os.kill(pid, signal.SIGKILL)
    assert all("Killed(sig=9)" in why for _, _, why in heard(sender, 2))
    faults.wait()


@pytest.mark.parametrize("answer", ["fail", "raise"])
def test_what_is_not_handled_fails_the_sender(grid: ProcMesh, faults: Faults, answer: str) -> None:
    sender: Any = grid.slice(x=0, y=0).spawn("sender", Sender, answer)
    target: Any = grid.slice(x=1, y=0).spawn("target", Target)
    target.stop().get(DEADLINE)
    sender.put.call_one(target, 1).get(DEADLINE)
    (failure,) = faults.wait()
    assert failure.mesh_name == sender._name.get()
    assert "undeliverable message for" in failure.report()
    assert ("raised while it was told" in failure.report()) == (answer == "raise")
    assert isinstance(sender.heard.call_one().exception(DEADLINE), SupervisionError)


def test_a_target_whose_init_fails(grid: ProcMesh, faults: Faults) -> None:
    sender: Any = grid.slice(x=0, y=0).spawn("sender", Sender, "drop")
    target: Any = grid.slice(x=1, y=0).spawn("target", Target, fail=True)
    sender.put.call_one(target, 1).get(DEADLINE)
    faults.wait()
    sender.put.call_one(target, 2).get(DEADLINE)
    # The first may have been taken in before __init__ failed, and is then dropped with the actor.
    told = wait_until(lambda: sender.heard.call_one().get(DEADLINE))
    assert all("no good init" in why for _, _, why in told)


def test_messages_that_arrive_are_not_told_of(grid: ProcMesh) -> None:
    sender: Any = grid.slice(x=0, y=0).spawn("sender", Sender, "fail")
    targets: Any = grid.spawn("targets", Target)
    for number in range(20):
        sender.put.broadcast(targets, number)
    assert sender.heard.call_one().get(DEADLINE) == []
    assert targets.get.call().get(DEADLINE).values() == [list(range(20))] * 4


def test_what_is_sent_to_a_port_of_a_process_that_is_gone(
    grid: ProcMesh, spawn: Callable[..., ProcMesh], faults: Faults
) -> None:
    sender: Any = grid.slice(x=0, y=0).spawn("sender", Sender, "drop")
    opener: Any = spawn(name="doomed").spawn("opener", Opener)
    port = opener.open.call_one().get(DEADLINE)
    sender.say.call_one(port, "first").get(DEADLINE)
    assert opener.received.call_one().get(DEADLINE) == "first"
    os.kill(opener.pid.call_one().get(DEADLINE), signal.SIGKILL)
    faults.wait()
    sender.say.call_one(port, "nobody knows", wants_to_know=False).get(DEADLINE)
    assert sender.heard.call_one().get(DEADLINE) == []
    sender.say.call_one(port, "second").get(DEADLINE)
    ((who, whom, why),) = heard(sender, 1)
    assert "Sender sender" in who
    assert whom.startswith("port ")
    assert "of proc doomed-" in whom
    assert "Killed(sig=9)" in why


def test_what_comes_to_a_port_is_not_told_of(grid: ProcMesh) -> None:
    sender: Any = grid.slice(x=0, y=0).spawn("sender", Sender, "fail")
    opener: Any = grid.slice(x=1, y=0).spawn("opener", Opener)
    here, receiver = Channel.open()
    for port in (here, opener.open.call_one().get(DEADLINE)):
        sender.say.call_one(port, 1).get(DEADLINE)
    assert receiver.recv().get(DEADLINE) == opener.received.call_one().get(DEADLINE) == 1
    assert sender.heard.call_one().get(DEADLINE) == []
