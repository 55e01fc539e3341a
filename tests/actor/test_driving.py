"""Threads that wait for answers read them: what that must not break."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import DEADLINE

from monarch_slurm.actor import Actor, Channel, ProcMesh, context, endpoint


class Echo(Actor):
    @endpoint
    def echo(self, value: int) -> int:
        return value

    @endpoint
    def ask(self, other: Any, rounds: int) -> list[int]:
        return [other.echo.call_one(number).get(DEADLINE) for number in range(rounds)]


class AsyncEcho(Actor):
    @endpoint
    async def echo(self, value: int) -> int:
        return value

    @endpoint
    async def ask(self, other: Any, rounds: int) -> list[int]:
        return [await other.echo.call_one(number) for number in range(rounds)]

    @endpoint
    async def ask_at_once(self, other: Any, rounds: int) -> list[int]:
        return list(await asyncio.gather(*(other.echo.call_one(number) for number in range(rounds))))

    @endpoint
    async def sleep(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds


class Interruption(BaseException):
    """As KeyboardInterrupt is: nothing takes it for a result."""


@pytest.fixture
def alarm() -> Iterator[Callable[[float, Callable[[], object]], None]]:
    """Sets what happens on the main thread in the middle of something, and when."""
    before = signal.getsignal(signal.SIGALRM)

    def set_alarm(seconds: float, action: Callable[[], object]) -> None:
        signal.signal(signal.SIGALRM, lambda *_: action())
        signal.setitimer(signal.ITIMER_REAL, seconds)

    yield set_alarm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def interrupt() -> None:
    raise Interruption


def test_an_exception_of_a_signal_handler_loses_no_message(
    spawn: Callable[..., ProcMesh], alarm: Callable[[float, Callable[[], object]], None]
) -> None:
    procs = spawn(per_host={"n": 1})
    echo: Any = procs.spawn("echo", Echo)
    assert echo.echo.call_one(-1).get(DEADLINE) == -1
    interrupted = 0
    for number in range(300):
        future = None
        try:
            alarm(random.uniform(1e-6, 2e-3), interrupt)
            future = echo.echo.call_one(number)
            future.get(DEADLINE)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Interruption:
            interrupted += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        if future is not None:
            assert future.get(DEADLINE) == number
    assert echo.echo.call_one(-1).get(DEADLINE) == -1
    assert interrupted
    assert signal.getsignal(signal.SIGALRM) is not None
    procs.stop().get(DEADLINE)
    replies = context().actor_instance.runtime.replies
    waited_for = {key for expected in replies._replies.values() for key in expected.answers.keys}
    assert f"{procs._layout.mesh}.0" not in waited_for
    assert f"{procs._layout.mesh}.0" not in replies._by_key


def test_a_signal_handler_runs_while_get_waits(
    spawn: Callable[..., ProcMesh], alarm: Callable[[float, Callable[[], object]], None]
) -> None:
    actor: Any = spawn(per_host={"n": 1}).spawn("actor", AsyncEcho)
    assert actor.echo.call_one(1).get(DEADLINE) == 1
    came: list[bool] = []
    future = actor.sleep.call_one(0.5)
    alarm(0.05, lambda: came.append(future._done))
    handler = signal.getsignal(signal.SIGALRM)
    assert future.get(DEADLINE) == 0.5
    assert came == [False]
    assert signal.getsignal(signal.SIGALRM) is handler


def test_a_value_that_another_thread_brings_ends_the_wait(spawn: Callable[..., ProcMesh]) -> None:
    port, receiver = Channel.open()
    thread = threading.Timer(0.1, lambda: port.send("here"))
    thread.start()
    assert receiver.recv().get(DEADLINE) == "here"
    thread.join()
    with pytest.raises(TimeoutError):
        receiver.recv().get(0.01)


def test_many_threads_wait_at_once(spawn: Callable[..., ProcMesh]) -> None:
    echo: Any = spawn(per_host={"n": 1}).spawn("echo", Echo)
    answers: dict[int, list[int]] = {}

    def talk(me: int) -> None:
        answers[me] = [echo.echo.call_one(me * 1000 + number).get(DEADLINE) for number in range(100)]

    threads = [threading.Thread(target=talk, args=(me,)) for me in range(8)]
    for thread in threads:
        thread.start()
    assert [echo.echo.call_one(number).get(DEADLINE) for number in range(100)] == list(range(100))
    for thread in threads:
        thread.join(DEADLINE)
    assert answers == {me: [me * 1000 + number for number in range(100)] for me in range(8)}


def test_a_forked_child_that_waits_takes_no_messages_of_its_parent(spawn: Callable[..., ProcMesh]) -> None:
    actor: Any = spawn(per_host={"n": 1}).spawn("actor", AsyncEcho)
    assert actor.echo.call_one(0).get(DEADLINE) == 0
    pending = actor.sleep.call_one(0.3)
    pid = os.fork()
    if pid == 0:
        os._exit(not isinstance(pending.exception(1.0), TimeoutError))
    assert pending.get(DEADLINE) == 0.3
    assert actor.echo.call_one(1).get(DEADLINE) == 1
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("asking", [Echo, AsyncEcho])
@pytest.mark.parametrize("answering", [Echo, AsyncEcho])
def test_actors_of_one_proc_that_wait_do_not_take_the_messages_of_each_other(
    spawn: Callable[..., ProcMesh], asking: type, answering: type
) -> None:
    here, there = spawn(per_host={"n": 1}), spawn(per_host={"n": 1})
    idle: Any = here.spawn("idle", Echo)
    idle_too: Any = here.spawn("idle_too", AsyncEcho)
    asker: Any = here.spawn("asker", asking)
    other: Any = there.spawn("other", answering)
    neighbour: Any = here.spawn("neighbour", answering)
    for _ in range(3):
        assert idle.echo.call_one(1).get(DEADLINE) == 1
        assert idle_too.echo.call_one(2).get(DEADLINE) == 2
        pending = asker.ask.call_one(other, 50)
        assert [idle.echo.call_one(number).get(DEADLINE) for number in range(20)] == list(range(20))
        assert pending.get(DEADLINE) == list(range(50))
        assert asker.ask.call_one(neighbour, 20).get(DEADLINE) == list(range(20))
    if asking is AsyncEcho:
        assert asker.ask_at_once.call_one(other, 200).get(DEADLINE) == list(range(200))
        assert asker.sleep.call_one(0.01).get(DEADLINE) == 0.01
