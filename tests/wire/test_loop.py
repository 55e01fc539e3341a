from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator

import pytest
from support import DEADLINE, wait_until

from monarch_slurm.wire import Loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.stop()
    made.join(DEADLINE)


def test_calls_run_on_the_loops_thread_in_their_order(loop: Loop) -> None:
    seen: list[tuple[int, str]] = []
    for number in range(100):
        loop.call_soon(lambda number=number: seen.append((number, threading.current_thread().name)))
    loop.start("the loop")
    for number in range(100, 200):
        loop.call_soon(lambda number=number: seen.append((number, threading.current_thread().name)))
    wait_until(lambda: len(seen) == 200)
    assert seen == [(number, "the loop") for number in range(200)]


def test_calls_of_many_threads_are_not_lost(loop: Loop) -> None:
    loop.start("loop")
    seen: list[int] = []

    def call(start: int) -> None:
        for number in range(start, start + 5000):
            loop.call_soon(lambda number=number: seen.append(number))

    threads = [threading.Thread(target=call, args=(start,)) for start in range(0, 40_000, 5000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: len(seen) == 40_000)
    assert sorted(seen) == list(range(40_000))


def test_timers_fire_in_the_order_of_their_times_and_not_before() -> None:
    now = [0.0]
    loop = Loop(clock=lambda: now[0])
    seen: list[str] = []
    loop.call_later(3.0, lambda: seen.append("third"))
    loop.call_later(1.0, lambda: seen.append("first"))
    loop.call_later(1.0, lambda: seen.append("second"))
    cancelled = loop.call_later(2.0, lambda: seen.append("never"))
    cancelled.cancel()
    loop.call_soon(lambda: None)
    loop._round()
    assert seen == []
    now[0] = 2.5
    loop._round()
    assert seen == ["first", "second"]
    assert loop.late == 1.5
    now[0] = 10.0
    loop._round()
    assert seen == ["first", "second", "third"]


def test_readers(loop: Loop) -> None:
    read_end, write_end = os.pipe()
    seen: list[bytes] = []
    loop.add_reader(read_end, lambda: seen.append(os.read(read_end, 100)))
    loop.start("loop")
    os.write(write_end, b"one")
    wait_until(lambda: seen == [b"one"])
    removed = threading.Event()
    loop.call_soon(lambda: (loop.remove_reader(read_end), removed.set()))  # type: ignore[func-returns-value]
    assert removed.wait(DEADLINE)
    os.write(write_end, b"two")
    later = threading.Event()
    loop.call_soon(later.set)
    assert later.wait(DEADLINE)
    assert seen == [b"one"]
    os.close(write_end)
    os.close(read_end)


def test_a_callback_that_raises_costs_nobody_else_anything(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    seen = threading.Event()

    def fail() -> None:
        raise ValueError("on purpose")

    with caplog.at_level(logging.ERROR):
        loop.call_soon(fail)
        loop.call_later(0.0, fail)
        loop.call_later(0.01, seen.set)
        loop.start("loop")
        assert seen.wait(DEADLINE)
    assert caplog.text.count("a callback of the I/O loop failed") == 2
    assert "on purpose" in caplog.text


def test_a_loop_can_be_stopped_from_a_callback() -> None:
    loop = Loop()
    loop.call_soon(loop.stop)
    loop.run()
