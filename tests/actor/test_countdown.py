from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from monarch_slurm.actor.casting import _REMEMBERED, TargetTable
from monarch_slurm.actor.layout import ProcLayout
from monarch_slurm.actor.ndslice import Slice
from monarch_slurm.actor.replies import CountDown


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Have threads take turns after a microsecond."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def on_threads(count: int, body: object) -> list[BaseException]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            body()  # type: ignore[operator]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_a_countdown_on_several_threads_ends_once(eager_switches: None) -> None:
    ends: list[int] = []
    count_down = CountDown(4 * 5000, lambda: ends.append(1))
    assert on_threads(4, lambda: [count_down() for _ in range(5000)]) == []
    assert ends == [1]
    assert count_down.left == 0


def test_a_countdown_of_nothing_ends_at_once() -> None:
    ends: list[int] = []
    CountDown(0, lambda: ends.append(1))
    assert ends == [1]


def test_targets_are_found_on_several_threads_and_not_kept_for_ever(eager_switches: None) -> None:
    table = TargetTable()
    layout = ProcLayout("mesh", ("a", "b"), 4, None)

    def body() -> None:
        for start in range(2 * _REMEMBERED):
            for width in (1, 2, 3):
                found = table.find(layout, Slice(offset=start % 5, sizes=[width], strides=[1]))
                assert sum(map(len, found.by_host.values())) == width

    assert on_threads(4, body) == []
    for number in range(3 * _REMEMBERED):
        table.find(ProcLayout(f"mesh{number}", ("a",), 1, None), Slice(offset=0, sizes=[1], strides=[1]))
    assert len(table._known) == _REMEMBERED
