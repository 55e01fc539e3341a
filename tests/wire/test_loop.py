from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from support import DEADLINE, REPOSITORY, wait_until

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


class Held:
    """A loop with a clock of its own, a pipe that brings signs of life, and a timer that asks when the last one was
    heard."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.loop = Loop(clock=lambda: self.now)
        self.read_end, self.write_end = os.pipe()
        self.heard = 0.0
        self.silences: list[float] = []
        self.loop.add_reader(self.read_end, self._hear)

    def _hear(self) -> None:
        os.read(self.read_end, 100)
        self.heard = self.loop.awake

    def judge_in(self, seconds: float) -> None:
        self.loop.call_later(seconds, lambda: self.silences.append(self.loop.awake - self.heard))

    def pause(self, seconds: float, sign_of_life: bool = True) -> None:
        """This process does nothing for a while, in which the other says something."""
        self.now += seconds
        if sign_of_life:
            os.write(self.write_end, b"beat")

    def run(self) -> float:
        """Run until the timer has fired; return the silence that it has seen."""
        while not self.silences:
            self.loop._round()
        (silence,) = self.silences
        return silence


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    yield made
    os.close(made.read_end)
    os.close(made.write_end)


def test_what_arrived_during_a_slow_callback_is_read_before_a_timer_fires(held: Held) -> None:
    held.judge_in(0.1)
    held.loop.call_soon(lambda: held.pause(600.0))
    assert held.run() == 0.0


def test_what_arrived_while_a_call_waited_is_read_before_a_timer_fires(held: Held) -> None:
    held.judge_in(0.1)
    held.loop.call_soon(lambda: None)
    held.pause(600.0)
    assert held.run() == 0.0


def test_what_arrived_while_another_timer_took_long_is_read_before_a_timer_fires(held: Held) -> None:
    held.loop.call_later(0.0, lambda: held.pause(600.0))
    held.judge_in(0.0)
    assert held.run() == 0.0


def test_a_silence_counts_only_while_the_loop_could_hear(held: Held) -> None:
    held.judge_in(0.1)
    held.loop.call_soon(lambda: held.pause(600.0, sign_of_life=False))
    assert held.run() < 1.0


def test_timers_fire_although_every_round_is_slow(held: Held) -> None:
    fired: list[int] = []

    def slow() -> None:
        held.now += 10.0
        held.loop.call_after(slow)

    held.loop.call_after(slow)
    for number in range(5):
        held.loop.call_later(1.0, lambda number=number: fired.append(number))  # type: ignore[misc]
    for _ in range(10):
        held.loop._round()
    assert fired == [0, 1, 2, 3, 4]


def test_a_deadline_for_others_does_not_pass_while_the_loop_is_held_up(held: Held) -> None:
    over: list[float] = []
    held.loop.call_at_deadline(60.0, lambda: over.append(held.loop.awake))
    for _ in range(3):
        held.loop.call_soon(lambda: held.pause(600.0))
        held.loop._round()
    assert over == []
    for _ in range(400):
        held.now += 0.15
        held.loop.call_soon(lambda: None)
        held.loop._round()
    assert len(over) == 1
    assert over[0] >= 60.0


def test_a_deadline_can_be_taken_back(held: Held) -> None:
    over: list[bool] = []
    deadline = held.loop.call_at_deadline(1.0, lambda: over.append(True))
    held.loop.call_soon(lambda: held.pause(600.0))
    held.loop._round()
    deadline.cancel()
    assert not deadline.pending
    for _ in range(30):
        held.now += 0.15
        held.loop.call_soon(lambda: None)
        held.loop._round()
    assert over == []


STOPPED = """
import os, signal, sys
from monarch_slurm.wire import Liveness, Loop

where = sys.argv[1]
loop, liveness, looks = Loop(), Liveness(0.5, 0.5), 0

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

def hear():
    if os.read(0, 100):
        liveness.heard("peer", loop.awake)
    else:
        loop.stop()

def look():
    global looks
    looks += 1
    if looks == 3:
        if where == "timer":
            stop()
        elif where == "call":
            loop.call_soon(lambda: None)
            loop.call_soon(stop)
        elif where == "sleep":
            print("asleep", flush=True)
    if liveness.lost(loop.awake):
        print("lost", flush=True)
    loop.call_later(0.1, look)

loop.add_reader(0, hear)
liveness.heard("peer", loop.awake)
loop.call_later(0.1, look)
loop.run()
print("end", flush=True)
"""


@pytest.mark.parametrize("where", ["timer", "call", "sleep"])
def test_a_process_that_is_stopped_loses_nobody(where: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", STOPPED, where],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert child.stdin is not None
    assert child.stdout is not None

    def beat_until(condition: Callable[[], bool]) -> None:
        """The peer lives, and says so all the time."""
        assert child.stdin is not None
        while not condition():
            os.write(child.stdin.fileno(), b".")
            time.sleep(0.02)

    said = select.poll()
    said.register(child.stdout, select.POLLIN)
    if where == "sleep":
        beat_until(lambda: bool(said.poll(0)))
        assert child.stdout.readline() == b"asleep\n"
        os.kill(child.pid, signal.SIGSTOP)
    beat_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
    end = time.monotonic() + 1.5  # three times the limit
    beat_until(lambda: time.monotonic() > end)
    os.kill(child.pid, signal.SIGCONT)
    end = time.monotonic() + 1.0
    beat_until(lambda: time.monotonic() > end)
    said_at_last, _ = child.communicate(timeout=DEADLINE)
    assert said_at_last == b"end\n"
