from __future__ import annotations

import pytest

from monarch_slurm.actor.debugger.ranks import RanksError, parse_cast, parse_ranks

RANKS = [(host * 4 + gpu, {"host": host, "gpu": gpu}) for host in range(3) for gpu in range(4)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", [1]),
        ("1,4, 6", [1, 4, 6]),
        ("2:9:3", [2, 5, 8]),
        (":", list(range(12))),
        ("10:", [10, 11]),
        (":2,7", [0, 1, 7]),
        ("host=1", [4, 5, 6, 7]),
        ("host=0:3:2, gpu=(0,3)", [0, 3, 8, 11]),
        ("gpu=(1,2:4)", [1, 2, 3, 5, 6, 7, 9, 10, 11]),
        ("99", []),
    ],
)
def test_which_ranks_are_meant(text: str, expected: list[int]) -> None:
    wanted = parse_ranks(text)
    assert [rank for rank, coords in RANKS if wanted(rank, coords)] == expected


@pytest.mark.parametrize("text", ["", " ", "x", "1:2:3:4", "::0", "-1", "1,host=2", "host=", "host=a", "(1"])
def test_what_names_no_ranks_is_refused(text: str) -> None:
    with pytest.raises(RanksError):
        parse_ranks(text)


def test_an_unknown_dimension_is_named_with_those_that_there_are() -> None:
    with pytest.raises(RanksError, match="no dimension 'pod'; there are: host, gpu"):
        parse_ranks("pod=1")(0, {"host": 0, "gpu": 0})


def test_a_cast_has_actor_ranks_and_command() -> None:
    actor, wanted, command = parse_cast("trainer ranks(gpu=(0,1), host=2)  p f(x, (1))")
    assert (actor, command) == ("trainer", "p f(x, (1))")
    assert wanted(8, {"gpu": 0, "host": 2})
    for text in ("", "trainer", "trainer ranks(1", "trainer ranks(1)", "trainer p x", "trainer ranks((1) p x"):
        with pytest.raises(RanksError, match="cast ACTOR"):
            parse_cast(text)
