from __future__ import annotations

import pytest

from monarch_slurm.actor.direct_asks import Asks
from monarch_slurm.config import configured


def calls_until_due(asks: Asks, name: str, most: int = 5000) -> int:
    return next((number for number in range(1, most) if asks.count(name)), 0)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_proc_is_asked_after_some_calls_and_much_later_again(after: int) -> None:
    asks = Asks()
    with configured(direct_link_after=after):
        assert calls_until_due(asks, "a") == after
        if after:
            assert calls_until_due(asks, "a") > 100, "one that has no room is left alone for a while"
            assert calls_until_due(asks, "b") == after


def test_only_the_answer_to_the_last_question_counts() -> None:
    asks = Asks()
    old = asks.ask("a")
    asks.forget("a")  # it has ended, and starts again
    assert not asks.answered("a", old)
    new = asks.ask("a")
    assert not asks.answered("a", old)
    assert "a" in asks
    assert asks.answered("a", new)
    assert "a" not in asks
    assert not asks.answered("a", new)


def test_what_is_counted_is_bounded() -> None:
    asks = Asks()
    asks.after = 2
    for number in range(10_000):
        asks.count(f"proc {number}")
    assert len(asks._calls) <= 5000
