"""The failure schedule."""

from __future__ import annotations

from itertools import islice

import pytest

from monarch_slurm.errors import ConfigError
from monarch_slurm.train.injection import KINDS, Injection, parse_kinds, schedule


def first(n: int, seed: int, kinds: tuple[str, ...] = KINDS) -> list[Injection]:
    return list(islice(schedule(5.0, kinds, replicas=4, ranks=2, seed=seed), n))


def test_the_schedule_is_the_seeds() -> None:
    assert first(50, seed=1) == first(50, seed=1)
    assert first(50, seed=1) != first(50, seed=2)


def test_kinds_take_turns_and_targets_are_drawn() -> None:
    planned = first(400, seed=0)
    assert [failure.kind for failure in planned[:8]] == [*KINDS, *KINDS]
    assert {failure.replica for failure in planned} == {0, 1, 2, 3}
    assert {failure.rank for failure in planned} == {0, 1}
    assert [failure.at for failure in planned[:3]] == [5.0, 10.0, 15.0]


def test_kinds_are_parsed() -> None:
    assert parse_kinds("hang, kill") == ("hang", "kill")


@pytest.mark.parametrize("text", ["", "  ", ",", "kill,explode", "KILL"])
def test_unknown_kinds_are_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(ConfigError, match="segfault"):
        parse_kinds(text)
