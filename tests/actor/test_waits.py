"""Actors that wait for themselves or for each other get an error that says so; nobody else does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support import DEADLINE, wait_until

from monarch_slurm.actor import (
    Accumulator,
    Actor,
    ActorDeadlockError,
    ActorError,
    Port,
    ProcMesh,
    concurrent_endpoint,
    context,
    endpoint,
    this_host,
)

ITSELF, EACH_OTHER = "waits for itself", "wait for each other"
LONG = 2 * DEADLINE


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    mesh = this_host().spawn_procs({"n": 2}, name="waiting")
    yield mesh
    mesh.stop().get(DEADLINE)


def wait(mesh: Any, how: str) -> object:
    if how == "call":
        return mesh.rank.call().get()
    if how == "with a time-out":
        return mesh.rank.call().get(LONG)
    if how == "stream":
        return [answer.get() for answer in mesh.rank.stream()]
    if how == "accumulate":
        return Accumulator(mesh.rank, 0, lambda total, _: total + 1).accumulate().get()
    if how == "poll":
        time.sleep(0.5)
        future = mesh.rank.call()
        while True:
            try:
                return future.get(0.05)
            except ActorDeadlockError:
                raise
            except TimeoutError:
                continue
    raise AssertionError(how)


class Waiting(Actor):
    def __init__(self) -> None:
        self.kept: Any = None
        self.thread: Any = None
        self.has_begun = False

    @endpoint
    def rank(self) -> int:
        return context().actor_instance.rank.rank

    @endpoint
    def wait(self, mesh: Any, how: str) -> object:
        return wait(mesh, how)

    @endpoint
    def keep(self, mesh: Any, method: str, *args: Any) -> None:
        self.kept = getattr(mesh, method).call_one(*args)

    @endpoint
    def wait_for_kept(self, timeout: float | None = None) -> object:
        return self.kept.get(timeout)

    @endpoint
    def ask_to_ask(self, other: Any, back: Any, timeout: float | None, back_timeout: float | None) -> str:
        """Call ``other``, which calls ``back``, and wait; return how the wait ended."""
        try:
            return str(other.ask.call_one(back, back_timeout).get(timeout))
        except ActorDeadlockError as error:
            return f"deadlock: {error}"
        except TimeoutError:
            return "time-out"

    @endpoint
    def ask(self, other: Any, timeout: float | None) -> str:
        try:
            return f"answered {other.rank.call_one().get(timeout)}"
        except ActorDeadlockError as error:
            return f"deadlock: {error}"
        except TimeoutError:
            return "time-out"

    @endpoint(explicit_response_port=True)
    def later(self, port: Port[str], seconds: float) -> None:
        self.has_begun = True
        threading.Timer(seconds, port.send, ["later"]).start()

    @endpoint
    def begun(self) -> bool:
        return self.has_begun

    @endpoint
    def kept_is_there(self) -> bool:
        return repr(self.kept) != "<Future pending>"

    @endpoint
    def thread_is_done(self) -> bool:
        return bool(self.thread.done())

    @endpoint
    def take_kept(self) -> str:
        """Return the error of a kept call that has failed, as text."""
        return str(self.kept.exception(DEADLINE))

    @endpoint
    def keep_and_sleep(self, mesh: Any, me: Any, seconds: float) -> None:
        self.kept = mesh.ask.call_one(me, None)
        time.sleep(seconds)

    @endpoint
    def wait_on_a_thread(self, mesh: Any) -> None:
        future = mesh.rank.call_one()
        self.thread = ThreadPoolExecutor(1).submit(future.get, DEADLINE)
        time.sleep(2.5)

    @endpoint
    def wait_for_thread(self) -> object:
        return self.thread.result(DEADLINE)


class Awaiting(Actor):
    def __init__(self) -> None:
        self.task: Any = None

    @endpoint
    async def rank(self) -> int:
        return context().actor_instance.rank.rank

    @concurrent_endpoint
    async def rank_beside(self) -> int:
        return context().actor_instance.rank.rank

    @endpoint
    async def wait(self, mesh: Any, how: str) -> object:
        if how == "await":
            return await mesh.rank.call()
        if how == "await of a concurrent endpoint":
            return await mesh.rank_beside.call_one()
        if how == "gather":
            return await asyncio.gather(mesh.rank.call(), mesh.rank.call())
        if how == "task":
            return await asyncio.create_task(self.in_task(mesh))
        return wait(mesh, how)

    async def in_task(self, mesh: Any) -> object:
        await asyncio.sleep(0)
        return await mesh.rank.call_one()

    @concurrent_endpoint
    async def wait_beside(self, mesh: Any) -> object:
        await asyncio.sleep(2.5)
        return [await mesh.rank.call_one(), await mesh.rank_beside.call_one()]

    @endpoint
    async def leave_a_task(self, mesh: Any) -> None:
        self.task = asyncio.create_task(self.in_task(mesh))
        await asyncio.sleep(2.5)

    @endpoint
    async def task_is_done(self) -> bool:
        return bool(self.task.done())

    @endpoint
    async def await_task(self) -> object:
        return await self.task

    @endpoint
    async def ask_to_ask(self, other: Any, back: Any, timeout: float | None, back_timeout: float | None) -> str:
        try:
            return str(await asyncio.wait_for(other.ask.call_one(back, back_timeout).as_asyncio(), timeout))
        except ActorDeadlockError as error:
            return f"deadlock: {error}"
        except (TimeoutError, asyncio.TimeoutError):
            return "time-out"

    @endpoint
    async def ask(self, other: Any, timeout: float | None) -> str:
        try:
            return f"answered {await asyncio.wait_for(other.rank.call_one().as_asyncio(), timeout)}"
        except ActorDeadlockError as error:
            return f"deadlock: {error}"
        except (TimeoutError, asyncio.TimeoutError):
            return "time-out"


BLOCKING = ("call", "with a time-out", "stream", "accumulate", "poll")
AWAITING = (*BLOCKING, "await", "await of a concurrent endpoint", "gather", "task")


@pytest.mark.parametrize(
    ("kind", "count", "hows"),
    [(Waiting, 1, BLOCKING), (Waiting, 2, BLOCKING), (Awaiting, 1, AWAITING), (Awaiting, 2, (*BLOCKING, "await"))],
)
def test_an_actor_that_waits_for_itself(procs: ProcMesh, kind: Any, count: int, hows: tuple[str, ...]) -> None:
    meshes = {how: procs.slice(n=slice(0, count)).spawn("waiting", kind) for how in hows}
    waits = {how: mesh.slice(n=0).wait.call_one(mesh, how) for how, mesh in meshes.items()}
    for how, mesh in meshes.items():
        with pytest.raises(ActorError, match=ITSELF) as caught:
            waits[how].get(DEADLINE)
        assert isinstance(caught.value.exception, TimeoutError)
        assert f"waiting{{'n': 0/{count}}}> waits in wait() for waiting.rank" in str(caught.value.exception)
        assert mesh.slice(n=0).rank.call_one().get(DEADLINE) == 0  # what it waited for was handled, and it lives
        mesh.stop().get(DEADLINE)


def test_a_call_that_an_actor_has_kept(procs: ProcMesh) -> None:
    one = procs.slice(n=0).spawn("waiting", Waiting)
    one.keep.call_one(one, "rank").get(DEADLINE)
    wait_until(lambda: one.kept_is_there.call_one().get(DEADLINE))
    assert one.wait_for_kept.call_one().get(DEADLINE) == 0
    one.keep.call_one(one, "wait_for_kept").get(DEADLINE)  # it waits for the call which it is in
    wait_until(lambda: one.kept_is_there.call_one().get(DEADLINE))
    kept = one.take_kept.call_one().get(DEADLINE)
    assert ITSELF in kept
    one.stop().get(DEADLINE)


def test_waits_that_end(procs: ProcMesh) -> None:
    one, other, third, fourth = (procs.slice(n=n).spawn("waiting", Waiting) for n in (0, 1, 0, 1))
    awaiting = procs.slice(n=0).spawn("awaiting", Awaiting)
    # A response port is answered from a thread, while its actor waits for the answer.
    one.keep.call_one(one, "later", 2.5).get(DEADLINE)
    wait_until(lambda: one.begun.call_one().get(DEADLINE))
    waits = [
        (one.wait_for_kept.call_one(), "later"),
        (other.keep_and_sleep.call_one(third, other, 2.5), None),  # third waits for it; it waits for nobody
        (fourth.wait_on_a_thread.call_one(fourth), None),
        (awaiting.wait_beside.call_one(awaiting), [0, 0]),
        (awaiting.leave_a_task.call_one(awaiting), None),
    ]
    for future, value in waits:
        assert future.get(DEADLINE) == value
    for done in (other.kept_is_there, fourth.thread_is_done, awaiting.task_is_done):
        wait_until(lambda: done.call_one().get(DEADLINE))  # noqa: B023 - called at once
    assert other.wait_for_kept.call_one().get(DEADLINE) == "answered 0"
    assert fourth.wait_for_thread.call_one().get(DEADLINE) == 0
    assert awaiting.await_task.call_one().get(DEADLINE) == 0
    for mesh in (one, other, third, fourth, awaiting):
        mesh.stop().get(DEADLINE)


KINDS = [(Waiting, Waiting), (Awaiting, Awaiting), (Waiting, Awaiting), (Awaiting, Waiting)]


def ask_to_ask(
    procs: ProcMesh, limits: tuple[float | None, float | None], kinds: list[tuple[type, type]]
) -> Iterator[tuple[type, type, str]]:
    """Yield how a wait ends in which actors wait for each other, with these limits, on one proc and on two."""
    pairs = [
        (procs.slice(n=0).spawn("one", first), procs.slice(n=place).spawn("other", second))
        for first, second in kinds
        for place in (0, 1)
    ]
    waits = [one.ask_to_ask.call_one(other, one, *limits) for one, other in pairs]
    for wait, (one, other) in zip(waits, pairs, strict=True):
        yield one._class, other._class, wait.get(DEADLINE)
        for mesh in (one, other):
            assert isinstance(mesh.rank.call_one().get(DEADLINE), int)
            mesh.stop().get(DEADLINE)


def test_two_actors_that_wait_for_each_other(procs: ProcMesh) -> None:
    for _, _, ended in ask_to_ask(procs, (None, None), KINDS):
        assert ended.startswith("deadlock: ")
        assert EACH_OTHER in ended
        assert ("waits in ask_to_ask() for other.ask()" in ended) or ("waits in ask() for one.rank()" in ended)


@pytest.mark.slow
def test_who_would_be_answered_after_the_time_out_of_the_other_is_not_blamed(procs: ProcMesh) -> None:
    for _, second, ended in ask_to_ask(procs, (None, 3.0), KINDS):
        assert "waits in ask_to_ask()" not in ended
        assert second is Awaiting or "waits in ask() for one.rank()" in ended
    for _, _, ended in ask_to_ask(procs, (LONG, None), KINDS[::2]):
        assert "waits in ask()" not in ended
        assert "waits in ask_to_ask() for other.ask()" in ended
