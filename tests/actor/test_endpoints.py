from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from sample_actors import AsyncLog, Bomb, Caller, Log, Unpicklable
from support import DEADLINE

from monarch_slurm.actor import (
    Accumulator,
    Actor,
    ActorError,
    Channel,
    ProcMesh,
    as_endpoint,
    concurrent_endpoint,
    endpoint,
    send,
)


@pytest.fixture(scope="module")
def logs(grid: ProcMesh) -> Any:
    return grid.spawn("log", Log)


@pytest.fixture(scope="module")
def async_logs(grid: ProcMesh) -> Any:
    return grid.spawn("async_log", AsyncLog)


def test_call_has_one_value_per_rank(logs: Any) -> None:
    answers = logs.rank.call().get(DEADLINE)
    assert str(answers.extent) == "{x: 2, y: 2}"
    assert answers.values() == [0, 1, 2, 3]
    assert logs.slice(y=1).rank.call().get(DEADLINE).values() == [0, 1]
    assert len({*logs.pid.call().get(DEADLINE).values()}) == 4


def test_call_one(logs: Any) -> None:
    assert logs.slice(x=1, y=0).rank.call_one().get(DEADLINE) == 0
    with pytest.raises(ValueError, match="call_one requires exactly 1 actor, but mesh has 4"):
        logs.rank.call_one()


def test_choose_reaches_every_actor_sometimes(logs: Any) -> None:
    chosen = {logs.pid.choose().get(DEADLINE) for _ in range(200)}
    assert chosen == set(logs.pid.call().get(DEADLINE).values())


def test_stream_gives_answers_in_the_order_of_arrival(logs: Any) -> None:
    start = time.monotonic()
    logs.slice(x=0, y=0).sleep.broadcast(0.3)
    first, *rest = logs.pid.stream()
    slow = logs.slice(x=0, y=0).pid.call_one()
    assert first.get(DEADLINE) != slow.get(DEADLINE)
    answers = [future.get(DEADLINE) for future in [first, *rest]]
    assert answers[-1] == slow.get()
    assert len(set(answers)) == 4
    assert time.monotonic() - start >= 0.3


def test_broadcast(logs: Any) -> None:
    logs.add.broadcast("b")
    assert all("b" in seen for seen in logs.get.call().get(DEADLINE).values())


def test_send_to_a_port(logs: Any) -> None:
    port, receiver = Channel.open_ranked()
    send(logs.add, ("sent",), {}, port)
    answers = {receiver.recv().get(DEADLINE) for _ in range(4)}
    assert answers == {(rank, "sent") for rank in range(4)}
    send(logs.add, ("chosen",), {}, port, selection="choose")
    assert receiver.recv().get(DEADLINE)[1] == "chosen"


def test_accumulator(logs: Any) -> None:
    total = Accumulator(logs.rank, 100, lambda total, rank: total + rank).accumulate()
    assert total.get(DEADLINE) == 106
    assert total.get() == 106
    failing = Accumulator(logs.fail, 0, lambda total, rank: total + rank).accumulate()
    assert isinstance(failing.exception(DEADLINE), ActorError)


def test_explicit_response_port(logs: Any) -> None:
    one = logs.slice(x=0, y=0)
    assert one.add_explicit.call_one("e").get(DEADLINE) == ("explicit", "e")
    assert logs.add_explicit.call("all").get(DEADLINE).values() == [("explicit", "all")] * 4


def test_as_endpoint(logs: Any, async_logs: Any) -> None:
    assert as_endpoint(logs.plain).call(3).get(DEADLINE).values() == [("plain", 3)] * 4
    explicit = as_endpoint(logs.plain_explicit, explicit_response_port=True)
    assert explicit.call(4).get(DEADLINE).values() == [("plain explicit", 4)] * 4
    assert as_endpoint(async_logs.plain).choose().get(DEADLINE) == "no loop"
    with pytest.raises(ActorError, match="is async, and this actor has no event loop"):
        as_endpoint(logs.plain_async).choose().get(DEADLINE)
    with pytest.raises(ValueError, match="expected an method of a spawned actor"):
        as_endpoint(logs.add)


def test_what_is_no_endpoint_cannot_be_called(logs: Any) -> None:
    with pytest.raises(RuntimeError, match="is not annotated as an endpoint"):
        logs.plain(3)
    with pytest.raises(AttributeError, match="has no endpoint or method 'nothing'"):
        logs.nothing  # noqa: B018
    with pytest.raises(TypeError):
        logs.add(3)


def test_arguments_are_checked_at_the_call(logs: Any) -> None:
    for wrong in (lambda: logs.add.call(), lambda: logs.add.broadcast(1, 2), lambda: logs.add.choose(other=1)):
        with pytest.raises(TypeError, match="argument"):
            wrong()
    with pytest.raises(TypeError, match="argument"):
        logs.add_explicit.call()
    with pytest.raises(TypeError, match=r"cannot pickle '_thread.lock' object"):
        logs.add.call(threading.Lock())
    with pytest.raises(TypeError, match="on purpose"):
        logs.add.broadcast(Unpicklable())


def test_arguments_are_a_snapshot(logs: Any) -> None:
    large = bytearray(1_000_000)
    future = logs.slice(x=0, y=0).add.call_one(large)
    large[:] = b"x" * len(large)
    assert future.get(DEADLINE) == bytes(1_000_000)


def test_lambdas_and_local_classes_can_be_sent(logs: Any) -> None:
    class Local:
        value = 7

    assert logs.slice(x=0, y=0).add.call_one(lambda: 5).get(DEADLINE)() == 5
    assert logs.slice(x=0, y=0).add.call_one(Local()).get(DEADLINE).value == 7


def test_one_error_of_several_comes_back_and_the_actors_live_on(logs: Any) -> None:
    with pytest.raises(ActorError, match=r"Actor call log\.fail failed") as caught:
        logs.fail.call([1, 3]).get(DEADLINE)
    assert isinstance(caught.value.exception, ValueError)
    text = str(caught.value)
    assert "Traceback of where the remote call failed (most recent call last):" in text
    assert "sample_actors.py" in text
    assert "monarch_slurm/actor" not in text
    assert logs.fail.call([]).get(DEADLINE).values() == [0, 1, 2, 3]


def test_chained_errors_tell_both(logs: Any) -> None:
    with pytest.raises(ActorError) as caught:
        logs.fail_as.choose("chained").get(DEADLINE)
    text = str(caught.value)
    assert "KeyError: 'the cause'" in text
    assert "ValueError: the effect" in text


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("unpicklable error", "UnpicklableError: its text"),
        ("badly unpickled error", "BadlyUnpickled"),
        ("unpicklable result", "cannot be pickled on purpose"),
    ],
)
def test_what_does_not_pickle_comes_back_as_text(logs: Any, kind: str, text: str) -> None:
    error = logs.fail_as.choose(kind).exception(DEADLINE)
    assert isinstance(error, ActorError)
    assert text in str(error)
    assert logs.rank.call().get(DEADLINE).values() == [0, 1, 2, 3]


def test_an_argument_that_does_not_unpickle_is_the_callers_error(logs: Any) -> None:
    error = logs.add.choose(Bomb()).exception(DEADLINE)
    assert isinstance(error, ActorError)
    assert "explodes when it is unpickled" in str(error)


def test_a_result_that_does_not_unpickle_is_an_error_here(logs: Any) -> None:
    future = logs.fail_as.choose("explosive result")
    assert isinstance(future.exception(DEADLINE), RuntimeError)
    assert future.exception() is future.exception()


def test_actors_can_be_sent_to_actors_and_called_there(grid: ProcMesh, logs: Any) -> None:
    caller: Any = grid.slice(x=0, y=0).spawn("caller", Caller)
    assert caller.call.call_one(logs.slice(x=1), "from afar").get(DEADLINE) == ["from afar"] * 2
    assert caller.sum_pids.call_one(logs).get(DEADLINE) == sum(logs.pid.call().get(DEADLINE).values())
    assert "from afar" in logs.slice(x=1, y=1).get.call_one().get(DEADLINE)
    assert "from afar" not in logs.slice(x=0, y=1).get.call_one().get(DEADLINE)


def test_concurrent_endpoints_overlap(async_logs: Any) -> None:
    waiting = [async_logs.wait_for_gate.call(number) for number in range(3)]
    for seen in async_logs.get.call().get(DEADLINE).values():
        assert [item for item in seen if item in (0, 1, 2)] == sorted(item for item in seen if item in (0, 1, 2))
    assert waiting[0].exception(0) is not None
    async_logs.open_gate.call().get(DEADLINE)
    assert [future.get(DEADLINE).values() for future in waiting] == [[number] * 4 for number in range(3)]


def test_errors_of_concurrent_endpoints(async_logs: Any) -> None:
    error = async_logs.fail_later.choose("exception").exception(DEADLINE)
    assert isinstance(error, ActorError)
    assert error.message == "Actor call async_log.fail_later failed."
    error = async_logs.fail_later.choose("cancelled").exception(DEADLINE)
    assert isinstance(error, ActorError)
    assert "failed with BaseException." in error.message
    assert async_logs.add.choose(1).get(DEADLINE) == 1


def test_a_concurrent_explicit_endpoint_may_answer_twice(async_logs: Any) -> None:
    port, receiver = Channel.open()
    send(async_logs.slice(x=0, y=0).answer_twice, (), {}, port)
    assert [receiver.recv().get(DEADLINE), receiver.recv().get(DEADLINE)] == [1, 2]


def test_background_tasks_of_async_actors_run_between_messages(async_logs: Any) -> None:
    one = async_logs.slice(x=0, y=0)
    one.background.call_one().get(DEADLINE)
    while "background" not in one.get.call_one().get(DEADLINE):
        pass


def test_classes_that_cannot_be_spawned(grid: ProcMesh) -> None:
    class Mixed(Actor):
        @endpoint
        def sync(self) -> None: ...
        @endpoint
        async def asynchronous(self) -> None: ...

    class Colliding(Actor):
        @endpoint
        def stop(self) -> None: ...  # type: ignore[override]

    class AsyncCleanup(Actor):
        @endpoint
        def sync(self) -> None: ...
        async def __cleanup__(self, exc: Exception | None) -> None: ...

    class SyncCleanup(Actor):
        @endpoint
        async def asynchronous(self) -> None: ...
        def __cleanup__(self, exc: Exception | None) -> None: ...

    class AsyncSupervise(Actor):
        @endpoint
        def sync(self) -> None: ...
        async def __supervise__(self, failure: object) -> bool: ...  # type: ignore[empty-body]

    class NoArguments(Actor):
        pass

    with pytest.raises(ValueError, match="mixes both async and sync endpoints"):
        grid.spawn("bad", Mixed)
    with pytest.raises(ValueError, match="ActorMesh has an attribute that collides with an endpoint name"):
        grid.spawn("bad", Colliding)
    with pytest.raises(ValueError, match="cannot be async"):
        grid.spawn("bad", AsyncCleanup)
    with pytest.raises(ValueError, match="must be async"):
        grid.spawn("bad", SyncCleanup)
    with pytest.raises(ValueError, match="cannot be async"):
        grid.spawn("bad", AsyncSupervise)
    with pytest.raises(ValueError, match="must subclass"):
        grid.spawn("bad", dict)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="takes no arguments"):
        grid.spawn("bad", NoArguments, 1)
    with pytest.raises(TypeError, match="too many positional"):
        grid.spawn("bad", Log, 1, 2, 3)
    with pytest.raises(TypeError, match="cannot pickle"):
        grid.spawn("bad", Log, threading.Lock())


def test_concurrent_endpoint_wraps_async_methods_only() -> None:
    with pytest.raises(ValueError, match="can only wrap async endpoints"):

        @concurrent_endpoint
        def sync(self: object) -> None: ...

    with pytest.raises(ValueError, match="does not wrap @endpoint"):

        @concurrent_endpoint
        @endpoint
        async def twice(self: object) -> None: ...


def test_an_actor_itself_is_no_mesh() -> None:
    log = Log()
    for use in (lambda: log.slice(x=0), lambda: log.initialized, lambda: log.stop()):
        with pytest.raises(NotImplementedError):
            use()
    assert log.logger.name == "Log"


class Named(Actor):
    """Its endpoints are called like what classes with abstract methods have."""

    @endpoint
    def register(self, number: int) -> int:
        return number

    @endpoint
    def mro(self) -> str:
        return "mine"


def test_endpoints_may_be_called_as_members_of_metaclasses(grid: ProcMesh) -> None:
    named: Any = grid.slice(x=0, y=0).spawn("named", Named)
    assert (named.register.call_one(5).get(DEADLINE), named.mro.call_one().get(DEADLINE)) == (5, "mine")
    with pytest.raises(AttributeError, match="has no endpoint or method 'register'"):
        grid.slice(x=0, y=0).spawn("log", Log).register  # noqa: B018
    named.stop().get(DEADLINE)
