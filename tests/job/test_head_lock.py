from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_slurm.job.head_lock import BEAT_SECONDS, HEAD_FILE, SILENCE_SECONDS, HeadLock, SecondHeadError


class Time:
    """A clock, and a sleep during which others may do something."""

    def __init__(self) -> None:
        self.now = 0.0
        self.meanwhile: Callable[[], None] = lambda: None

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()


@pytest.fixture
def time() -> Time:
    return Time()


def test_a_head_that_has_left_is_no_obstacle(tmp_path: Path, time: Time) -> None:
    first = HeadLock(tmp_path, "n1", 0, time)
    first.take(time.sleep)
    first.beat()
    first.release()
    assert not (tmp_path / HEAD_FILE).exists()
    HeadLock(tmp_path, "n2", 0, time).take(time.sleep)
    assert time.now == 0


def test_a_second_head_is_refused_and_told_of_the_first(tmp_path: Path, time: Time) -> None:
    first = HeadLock(tmp_path, "n1", 0, time)
    first.take(time.sleep)
    time.meanwhile = first.beat
    with pytest.raises(SecondHeadError, match=r"runs already: its head is pid \d+ on node n1 since 20.*on node n2"):
        HeadLock(tmp_path, "n2", 0, time).take(time.sleep)
    assert time.now <= 2 * BEAT_SECONDS
    first.beat()


def test_a_head_that_has_died_is_replaced_after_a_while(tmp_path: Path, time: Time) -> None:
    HeadLock(tmp_path, "n1", 0, time).take(time.sleep)
    second = HeadLock(tmp_path, "n2", 0, time)
    second.take(time.sleep)
    assert SILENCE_SECONDS <= time.now < SILENCE_SECONDS + 2
    second.beat()


def test_a_later_start_of_the_job_takes_the_place_at_once_and_the_earlier_ends(tmp_path: Path, time: Time) -> None:
    first, second = HeadLock(tmp_path, "n1", 0, time), HeadLock(tmp_path, "n2", 1, time)
    first.take(time.sleep)
    second.take(time.sleep)
    assert time.now < 1
    with pytest.raises(SecondHeadError, match=r"no longer the head of the job: another start of it, pid .* on node n2"):
        first.beat()
    first.release()
    second.beat()
    time.now += BEAT_SECONDS
    second.beat()


def test_of_two_that_take_a_dead_ones_place_one_stays(tmp_path: Path, time: Time) -> None:
    HeadLock(tmp_path, "n1", 0, time).take(time.sleep)
    second, third = HeadLock(tmp_path, "n2", 1, time), HeadLock(tmp_path, "n3", 1, time)

    def write_third() -> None:
        third._write()

    time.meanwhile = write_third
    with pytest.raises(SecondHeadError, match="on node n3"):
        second.take(time.sleep)
    third.beat()


def test_troubles_of_the_file_system_are_no_second_head(tmp_path: Path, time: Time) -> None:
    lock = HeadLock(tmp_path, "n1", 0, time)
    lock.take(time.sleep)
    (tmp_path / HEAD_FILE).write_text("{")
    time.now += BEAT_SECONDS
    lock.beat()
    (tmp_path / HEAD_FILE).unlink()
    time.now += BEAT_SECONDS
    lock.beat()
    assert json.loads((tmp_path / HEAD_FILE).read_text())["node"] == "n1"
