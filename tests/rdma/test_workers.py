"""Threads of transfers: a few for each owner, however many transfers wait for it."""

from __future__ import annotations

import threading
import time

from support import wait_until

from monarch_slurm.rdma.workers import Turns, Workers


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


def test_a_few_at_a_time_and_all_in_turn() -> None:
    turns, go, done = Turns(Workers(), 3), threading.Event(), []
    running = threading.Semaphore(3)

    def work(number: int) -> None:
        assert running.acquire(blocking=False), "more than three at a time"
        go.wait(60)
        done.append(number)
        running.release()

    before = threading.active_count()
    for number in range(2000):
        turns.run(lambda number=number: work(number), lambda: None, soon())  # type: ignore[misc]
    assert threading.active_count() <= before + 4, "three, and one that looks after deadlines"
    go.set()
    wait_until(lambda: len(done) == 2000)
    assert sorted(done) == list(range(2000))
    wait_until(lambda: turns._free == 3)
    wait_until(lambda: not turns._is_watched)


def test_whoever_waits_too_long_is_told_though_it_is_not_its_turn() -> None:
    turns, go, told, done = Turns(Workers(), 1), threading.Event(), [], threading.Event()
    turns.run(lambda: go.wait(60) and None, lambda: None, soon())
    turns.run(done.set, lambda: told.append("second"), soon(60))
    turns.run(lambda: told.append("ran"), lambda: told.append("third"), soon(0.05))
    turns.run(lambda: told.append("ran"), lambda: told.append("fourth"), soon(0.01))
    wait_until(lambda: len(told) == 2)
    assert sorted(told) == ["fourth", "third"]
    go.set()
    assert done.wait(60)
    assert sorted(told) == ["fourth", "third"]
    wait_until(lambda: not turns._is_watched)
