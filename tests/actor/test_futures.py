from __future__ import annotations

import asyncio
import functools
import gc
import pickle
import random
import signal
import threading
import time
from typing import Any

import pytest
from sample_actors import Log
from support import DEADLINE, wait_until

from monarch_slurm.actor import ActorError, Channel, Future, ProcMesh, context, returns_future


@pytest.fixture(scope="module")
def one(grid: ProcMesh) -> Any:
    return grid.slice(x=0, y=0).spawn("log", Log)


def test_a_future_cannot_be_made_or_sent(one: Any) -> None:
    with pytest.raises(TypeError, match="cannot be constructed"):
        Future()
    with pytest.raises(TypeError, match="belongs to the process that made it"):
        pickle.dumps(one.pid.call_one())


def test_a_time_out_consumes_nothing() -> None:
    port, receiver = Channel.open()
    future = receiver.recv()
    for _ in range(3):
        with pytest.raises(TimeoutError) as caught:
            future.get(timeout=0.01)
        assert str(caught.value) == (
            "no result within 0.01 s of recv(): nothing was sent to the port; it is not lost: a later get() may have it"
        )
    assert isinstance(future.exception(0), TimeoutError)
    assert repr(future) == "<Future pending>"
    port.send("late")
    assert future.get(DEADLINE) == "late"
    assert future.get() == future.result() == "late"
    assert future.exception() is None
    assert repr(future) == "<Future done>"


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf")])
def test_time_outs_that_make_no_sense(one: Any, timeout: float) -> None:
    future = one.rank.call_one()
    with pytest.raises(ValueError, match="invalid timeout"):
        future.get(timeout)
    assert future.get(DEADLINE) == 0


def test_an_error_is_the_same_each_time(one: Any) -> None:
    future = one.fail.call_one()
    error = future.exception(DEADLINE)
    assert isinstance(error, ActorError)
    for _ in range(2):
        with pytest.raises(ActorError) as caught:
            future.get()
        assert caught.value is error
    assert repr(future) == "<Future failed>"


def test_a_future_can_be_awaited_on_several_loops(one: Any) -> None:
    future = one.add.call_one("x")

    async def wait() -> object:
        first = await future
        second = await asyncio.wait_for(future.as_asyncio(), DEADLINE)
        assert first == second
        return first

    assert [asyncio.run(wait()) for _ in range(3)] == ["x"] * 3
    assert future.get() == "x"


def test_cancelling_one_who_waits_cancels_nothing_else() -> None:
    port, receiver = Channel.open()
    future = receiver.recv()

    async def wait() -> object:
        patient = asyncio.ensure_future(_await(future))
        hasty = future.as_asyncio()
        hasty.cancel()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_await(future), 0.01)
        port.send("for the patient one")
        return await patient

    assert asyncio.run(wait()) == "for the patient one"


async def _await(future: Future[Any]) -> Any:
    return await future


def test_await_needs_a_loop(one: Any) -> None:
    future = one.rank.call_one()
    with pytest.raises(ValueError, match="__await__ with no active event loop"):
        future.__await__().send(None)
    with pytest.raises(RuntimeError, match="requires a running asyncio event loop"):
        future.as_asyncio()
    assert future.get(DEADLINE) == 0


def test_get_inside_a_loop_warns_and_works(one: Any) -> None:
    async def block() -> object:
        return one.sleep.call_one(0.5).get(DEADLINE)

    with pytest.warns(UserWarning, match="called from within an active event loop"):
        assert asyncio.run(block()) is None


class Handlers:
    """Handlers of SIGUSR1 of every kind, each of which raises once."""

    def __init__(self) -> None:
        self.raised = False

    def __call__(self, number: int, frame: object) -> None:
        self.method(number, frame)

    def method(self, number: int, frame: object) -> None:
        if not self.raised:
            self.raised = True
            raise ConnectionError("said the handler")

    def function(self, number: int, frame: object) -> None:
        self.method(number, frame)


@pytest.mark.parametrize("kind", ["object", "method", "partial", "function"])
def test_what_a_signal_handler_raises_is_not_the_result(kind: str) -> None:
    handlers = Handlers()
    handler: Any = {
        "object": handlers,
        "method": handlers.method,
        "partial": functools.partial(Handlers.function, handlers),
        "function": lambda number, frame: handlers.method(number, frame),
    }[kind]

    def make_value() -> int:
        signal.raise_signal(signal.SIGUSR1)
        return 5

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        for look in (Future.get, Future.exception):
            future: Future[int] = Future._pending()
            future._resolve(make_value)
            handlers.raised = False
            with pytest.raises(ConnectionError, match="said the handler"):
                look(future)
            assert future.get() == 5
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_error_that_a_signal_handler_has_seen_is_still_the_result(one: Any) -> None:
    future = one.fail.call_one()
    seen: list[Exception | None] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(future.exception(DEADLINE)))
    try:
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert isinstance(seen[0], ActorError)
    assert future.exception() is seen[0]


def test_gather(one: Any) -> None:
    async def several() -> list[object]:
        return await asyncio.gather(*(one.add.call_one(number) for number in range(10)))

    assert asyncio.run(several()) == list(range(10))


def test_a_stop_iteration_as_the_result_of_a_channel() -> None:
    port, receiver = Channel.open()
    port.exception(StopIteration(1))  # type: ignore[arg-type]
    future = receiver.recv()

    async def wait() -> None:
        await future.as_asyncio()

    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(wait())


def test_many_threads_wait_for_one_future() -> None:
    port, receiver = Channel.open()
    future = receiver.recv()
    got: list[object] = []
    threads = [threading.Thread(target=lambda: got.append(future.get(DEADLINE))) for _ in range(20)]
    for thread in threads:
        thread.start()
    port.send([1])
    for thread in threads:
        thread.join(DEADLINE)
    assert got == [[1]] * 20
    assert all(value is got[0] for value in got)


def test_a_thread_that_waits_helps_and_the_main_thread_does_not() -> None:
    future: Future[str] = Future._pending()
    helpers: list[int] = []

    def help_on() -> None:
        helpers.append(threading.get_ident())
        future._resolve(lambda: "brought")

    future._help_with(help_on)
    for timeout in (0.01, 0):
        with pytest.raises(TimeoutError):
            future.get(timeout)
    assert helpers == []
    got: list[str] = []
    waiting = threading.Thread(target=lambda: got.append(future.get()))
    waiting.start()
    waiting.join(DEADLINE)
    assert (got, helpers, future.get()) == (["brought"], [waiting.ident], "brought")


def test_a_waiter_that_timed_out_leaves_nothing_behind() -> None:
    _, receiver = Channel.open()
    future = receiver.recv()
    for _ in range(100):
        assert isinstance(future.exception(0), TimeoutError)
    assert not future._waiters


# ---- channels


def test_a_channel_keeps_order() -> None:
    port, receiver = Channel[int].open()
    for number in range(1000):
        port.send(number)
    assert [receiver.recv().get(DEADLINE) for _ in range(1000)] == list(range(1000))


def test_an_exception_through_a_channel_is_raised_as_it_is() -> None:
    port, receiver = Channel.open()
    port.exception(ValueError("as it is"))
    with pytest.raises(ValueError, match=r"^as it is$"):
        receiver.recv().get(DEADLINE)


def test_a_once_port_takes_one_value() -> None:
    port, receiver = Channel.open(once=True)
    port.send(1)
    with pytest.raises(RuntimeError, match="OncePortRef already used"):
        port.send(2)
    assert receiver.recv().get(DEADLINE) == 1


def test_ports_can_be_sent_and_receivers_cannot(one: Any) -> None:
    port, receiver = Channel.open()
    one.add_through.call_one(port, "through").get(DEADLINE)
    assert receiver.recv().get(DEADLINE) == "through"
    with pytest.raises(TypeError, match="belongs to the process that opened it"):
        pickle.dumps(receiver)


def test_a_value_without_a_rank() -> None:
    port, receiver = Channel.open()
    port.send(1)
    with pytest.raises(ValueError, match="has no rank"):
        receiver.ranked().recv().get(DEADLINE)


def test_a_future_that_was_given_up_swallows_no_value() -> None:
    port, receiver = Channel.open()
    for _ in range(3):
        assert isinstance(receiver.recv().exception(0), TimeoutError)

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_await(receiver.recv()), 0.01)

    asyncio.run(give_up())
    gc.collect()
    port.send("for whoever asks next")
    assert receiver.recv().get(DEADLINE) == "for whoever asks next"


def test_a_future_takes_its_value_when_it_is_first_waited_for() -> None:
    port, receiver = Channel.open()
    first, second, third = (receiver.recv() for _ in range(3))
    for number in range(4):
        port.send(number)
    receiver.recv()  # nobody waits for this one
    assert third.get(DEADLINE) == 0
    assert first.exception(DEADLINE) is None
    assert first.get() == 1

    async def main() -> list[object]:
        return [await second.as_asyncio(), await receiver.recv(), await third, await first]

    assert asyncio.run(main()) == [2, 3, 0, 1]
    assert isinstance(receiver.recv().exception(0), TimeoutError)


def test_values_go_to_those_who_wait_in_the_order_in_which_they_began() -> None:
    port, receiver = Channel.open()

    async def main() -> list[object]:
        futures = [receiver.recv() for _ in range(5)]
        locals_ = [futures[index].as_asyncio() for index in (3, 1, 4, 0, 2)]
        locals_[1].cancel()
        await asyncio.sleep(0)  # the loop tells of it
        for number in range(4):
            port.send(number)
        got = await asyncio.gather(*(local for local in locals_ if not local.cancelled()))
        port.send("for the one that was cancelled before")
        return [*got, await futures[1]]

    assert asyncio.run(main()) == [0, 1, 2, 3, "for the one that was cancelled before"]


def test_a_future_that_timed_out_leaves_the_next_value_to_others_and_can_wait_again() -> None:
    port, receiver = Channel.open()
    early = receiver.recv()
    assert isinstance(early.exception(0.001), TimeoutError)
    port.send("first")
    port.send("second")
    assert receiver.recv().get(DEADLINE) == "first"
    assert early.get(DEADLINE) == "second"


def test_a_value_that_came_as_its_await_was_cancelled_goes_to_the_next() -> None:
    port, receiver = Channel.open()

    async def main() -> list[object]:
        cancelled = receiver.recv().as_asyncio()
        waiting = receiver.recv().as_asyncio()
        port.send("first")
        port.send("second")
        wait_until(lambda: not receiver._waiting, "both values came")
        cancelled.cancel()  # before this loop could hand it on
        return [await waiting, await receiver.recv()]

    assert sorted(asyncio.run(main()), key=str) == ["first", "second"]


def test_no_value_is_lost_or_doubled_whatever_waits_and_gives_up() -> None:
    port, receiver = Channel.open()
    count, got, lock = 600, [], threading.Lock()
    chance = random.Random(3)

    def take() -> None:
        while True:
            value = receiver.recv().exception(chance.choice([0, 0.0005, 0.01]))
            if isinstance(value, Given):
                with lock:
                    got.append(value.args[0])
                    if len(got) == count:
                        return
            with lock:
                if len(got) >= count:
                    return

    async def await_some() -> None:
        while len(got) < count:
            local = receiver.recv().as_asyncio()
            done, _ = await asyncio.wait([local], timeout=chance.choice([0, 0.0005, 0.01]))
            if done:
                with lock:
                    got.append(local.exception().args[0])  # type: ignore[union-attr]
            else:
                local.cancel()

    threads = [threading.Thread(target=take) for _ in range(2)]
    threads.append(threading.Thread(target=lambda: asyncio.run(await_some())))
    for thread in threads:
        thread.start()
    for number in range(count):
        port.exception(Given(number))
        if number % 7 == 0:
            time.sleep(0.0005)
    for thread in threads:
        thread.join(DEADLINE)
    assert sorted(got) == list(range(count))


class Given(Exception):
    pass


def test_a_future_that_is_awaited_gets_its_value_though_nobody_else_holds_it() -> None:
    port, receiver = Channel.open()

    async def wait() -> object:
        waiting = asyncio.ensure_future(_await(receiver.recv()))
        local = receiver.recv().as_asyncio()
        await asyncio.sleep(0)
        gc.collect()
        port.send("first")
        port.send("second")
        return await local, await waiting  # in the order in which they are first waited for

    assert asyncio.run(wait()) == ("first", "second")


def test_a_channel_that_nobody_can_read_is_closed() -> None:
    port, receiver = Channel.open()
    future = receiver.recv()
    channels = context().actor_instance.runtime.replies._channels
    del receiver
    gc.collect()
    port.send("to whoever waits")
    assert future.get(DEADLINE) == "to whoever waits"
    gc.collect()
    assert port._port is not None
    assert port._port[2] not in channels
    port.send("to nobody")


def test_a_closed_channel_takes_nothing() -> None:
    port, receiver = Channel.open()
    receiver.close()
    port.send(1)
    assert isinstance(receiver.recv().exception(0.05), TimeoutError)


def test_a_time_out_tells_how_many_have_answered(grid: ProcMesh) -> None:
    logs: Any = grid.spawn("slow", Log)
    logs.slice(x=0, y=0).sleep.broadcast(0.5)
    future = logs.pid.call()
    for rank in (1, 2, 3):
        logs.slice(x=rank // 2, y=rank % 2).pid.call_one().get(DEADLINE)
    with pytest.raises(TimeoutError, match=r"no result within 0 s of slow.pid\(\): 3 of 4 actors have answered; "):
        future.get(0)
    with pytest.raises(TimeoutError, match=r"no result within 0 s of slow.pid\(\); it is not lost"):
        logs.slice(x=0, y=0).pid.call_one().get(0)
    assert len(future.get(DEADLINE)) == 4


CALLS: list[str] = []


@returns_future
async def body(name: str, fail: bool = False) -> str:
    """Its text."""
    CALLS.append(name)
    await asyncio.sleep(0)
    if fail:
        raise ValueError("on purpose")
    return f"{name} in {context().actor_instance}"


def test_a_body_that_runs_when_it_is_looked_at() -> None:
    assert (body.__name__, body.__doc__) == ("body", "Its text.")
    CALLS.clear()
    body("never")
    future = body("once")
    gc.collect()
    assert CALLS == []
    assert future.get(DEADLINE) == "once in <root>"
    assert future.get() == "once in <root>"
    assert CALLS == ["once"]
    failing = body("failing", fail=True)
    assert isinstance(failing.exception(DEADLINE), ValueError)
    assert CALLS == ["once", "failing"]
    with pytest.raises(TypeError, match="missing a required argument: 'name'"):
        body()
    with pytest.raises(TypeError, match="is for async functions"):
        returns_future(lambda: None)  # type: ignore[arg-type,return-value]


def test_a_body_runs_on_the_loop_of_whoever_awaits() -> None:
    seen: list[object] = []

    @returns_future
    async def where() -> None:
        seen.append(asyncio.get_running_loop())

    async def main() -> None:
        await where()
        with pytest.warns(UserWarning, match="within an active event loop"):
            where().get(DEADLINE)
        assert [loop is asyncio.get_running_loop() for loop in seen] == [True, False]

    asyncio.run(main())


def test_waiting_for_a_body_can_be_given_up_and_the_body_goes_on() -> None:
    gates: list[asyncio.Event] = []

    @returns_future
    async def slow() -> str:
        gates.append(asyncio.Event())
        await gates[0].wait()
        return "done"

    async def main() -> None:
        future = slow()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future.as_asyncio(), 0.01)
        gates[0].set()
        assert await future == "done"
        assert len(gates) == 1

    asyncio.run(main())


def clean_up(events: list[str]) -> Future[str]:
    @returns_future
    async def slow() -> str:
        events.append("begins")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            events.append("cleaned up")
        return "never"

    return slow()


def test_a_get_that_runs_out_of_time_cancels_the_body_and_has_it_clean_up() -> None:
    events: list[str] = []
    future = clean_up(events)
    with pytest.raises(TimeoutError, match=r"slow\(\) was cancelled: a get\(\) of it ran out of time"):
        future.get(0.5)
    assert events == ["begins", "cleaned up"]
    with pytest.raises(TimeoutError, match="was cancelled"):
        future.get(DEADLINE)
    assert isinstance(clean_up([]).exception(0.0), TimeoutError)


def test_a_get_that_is_interrupted_cancels_the_body() -> None:
    events: list[str] = []
    future = clean_up(events)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        wait_until(lambda: events, "the body")
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        future.get(DEADLINE)
    thread.join()
    assert events == ["begins", "cleaned up"]


def test_a_get_that_runs_out_of_time_leaves_the_body_to_others_who_wait() -> None:
    gate = threading.Event()

    @returns_future
    async def slow() -> str:
        while not gate.is_set():
            await asyncio.sleep(0.001)
        return "done"

    future = slow()
    got: list[str] = []
    other = threading.Thread(target=lambda: got.append(future.get(DEADLINE)))
    other.start()
    wait_until(lambda: future._lazy._observers == 1, "the other waits")  # type: ignore[union-attr]
    with pytest.raises(TimeoutError, match=r"no result within 0\.01 s"):
        future.get(0.01)
    gate.set()
    other.join(DEADLINE)
    assert got == ["done"]
    assert future.get() == "done"


def test_a_body_whose_loop_ends_is_an_error() -> None:
    @returns_future
    async def for_ever() -> None:
        await asyncio.Event().wait()

    future = for_ever()

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future.as_asyncio(), 0.01)

    asyncio.run(give_up())
    with pytest.raises(RuntimeError, match="the event loop that the body of this future ran on has ended"):
        future.get(DEADLINE)
