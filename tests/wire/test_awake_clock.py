from __future__ import annotations

import math

from monarch_slurm.wire.awake_clock import LONGEST_PAUSE, AwakeClock


class World:
    def __init__(self) -> None:
        self.time = 100.0
        self.clock = AwakeClock(lambda: self.time)

    def after(self, seconds: float, waited: float = 0.0) -> float:
        self.time += seconds
        return round(self.clock.tick(waited), 6)


def test_work_and_sleep_count_in_full() -> None:
    world = World()
    assert world.after(0.1) == 0.1
    assert world.after(5.0, waited=5.0) == 5.1
    assert world.after(7.0, waited=math.inf) == 12.1


def test_a_pause_counts_little_wherever_it_comes() -> None:
    world = World()
    assert world.after(1000.0) == LONGEST_PAUSE
    assert world.after(1000.0, waited=1.0) == 2 * LONGEST_PAUSE + 1.0
    assert world.clock.now == 2 * LONGEST_PAUSE + 1.0


def test_a_wait_that_ends_early_counts_as_long_as_it_took() -> None:
    world = World()
    assert world.after(0.25, waited=10.0) == 0.25
