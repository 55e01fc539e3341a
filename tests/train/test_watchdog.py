"""The watchdog, replayed as events and times."""

from __future__ import annotations

import pytest

from monarch_slurm.train.watchdog import START_DEADLINE, Watchdog
from monarch_slurm.wire.awake_clock import AwakeClock


def dog(ranks: int = 1) -> Watchdog:
    return Watchdog(ranks, step_deadline=2.0, sync_deadline=30.0, now=0.0)


def phase(name: str, rank: int = 0) -> dict[str, object]:
    return {"kind": "phase", "rank": rank, "phase": name}


def step(rank: int = 0) -> dict[str, object]:
    return {"kind": "step", "rank": rank}


def test_a_step_has_its_own_deadline() -> None:
    watchdog = dog()
    watchdog.take(phase("compute"), 10.0)
    assert watchdog.due() == 12.0
    watchdog.take(step(), 11.5)
    assert watchdog.hung(13.4) is None
    verdict = watchdog.hung(13.6)
    assert verdict is not None
    assert verdict[0] == 0
    assert "compute" in verdict[1]


def test_waiting_for_others_is_no_hang() -> None:
    watchdog = dog()
    watchdog.take(phase("compute"), 0.0)
    watchdog.take(phase("sync"), 1.0)
    assert watchdog.hung(30.0) is None
    assert watchdog.hung(31.0) is not None


def test_deadlines_move_while_a_run_waits_for_a_host() -> None:
    watchdog = dog()
    watchdog.take(phase("sync"), 1.0)
    watchdog.extend(5.0)
    assert watchdog.due() == 36.0
    assert watchdog.hung(35.0) is None


def test_an_earlier_phase_brings_an_earlier_deadline() -> None:
    watchdog = dog()
    assert watchdog.due() == START_DEADLINE
    watchdog.take(phase("compute"), 1.0)
    assert watchdog.due() == 3.0


@pytest.mark.parametrize("name", ["compute", "sync", "eval"])
def test_a_silent_interpreter_is_a_hang_in_every_phase(name: str) -> None:
    watchdog = dog()
    watchdog.take(phase(name), 0.0)
    watchdog.pulse_asked(0, 0.1)
    watchdog.take(step(), 0.5)
    watchdog.take(phase(name), 2.0)
    verdict = watchdog.hung(2.2)
    assert verdict is not None
    assert "interpreter" in verdict[1]


def test_an_answer_ends_the_question() -> None:
    watchdog = dog()
    watchdog.take(phase("sync"), 0.0)
    watchdog.pulse_asked(0, 0.0)
    watchdog.pulse_answered(0)
    assert watchdog.hung(29.0) is None


def test_the_rank_that_is_longest_over_its_deadline_is_named() -> None:
    watchdog = dog(3)
    for rank, since in ((0, 5.0), (1, 1.0), (2, 3.0)):
        watchdog.take(phase("compute", rank), since)
    verdict = watchdog.hung(10.0)
    assert verdict is not None
    assert verdict[0] == 1


def test_a_finished_rank_is_watched_no_more() -> None:
    watchdog = dog()
    watchdog.pulse_asked(0, 0.0)
    watchdog.take({"kind": "finished", "rank": 0}, 1.0)
    assert watchdog.due() is None
    assert watchdog.hung(1e9) is None
    watchdog.take(step(), 2.0)
    watchdog.pulse_asked(0, 2.0)
    assert watchdog.due() is None


def test_nobody_hangs_because_the_supervisor_was_stopped() -> None:
    time = 0.0
    clock = AwakeClock(lambda: time)
    watchdog = dog()
    watchdog.take(phase("compute"), clock.tick())
    watchdog.pulse_asked(0, clock.tick())
    for _ in range(5):  # stopped at any moment, for much longer than a deadline
        time += 600.0
        assert watchdog.hung(clock.tick()) is None
    for _ in range(30):
        time += 0.1
        verdict = watchdog.hung(clock.tick())
    assert verdict is not None
