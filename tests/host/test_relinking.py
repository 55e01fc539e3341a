"""When a link that has broken is made again."""

from __future__ import annotations

from monarch_slurm.host.relinking import MOST_BEATS, Relinking


def beats_until_due(links: Relinking) -> int:
    beats = 1
    while not links.beat():
        beats += 1
    return beats


def test_waits_double_with_each_attempt() -> None:
    links = Relinking(4)
    waits = []
    for number in range(1, 13):
        assert links.attempt("a") == number
        waits.append(beats_until_due(links))
    assert waits == [4, 8, 16, 32, 64, 128, 256, 512, *[MOST_BEATS] * 4]


def test_a_link_that_breaks_at_once_is_not_made_at_once() -> None:
    links = Relinking(4)
    waits = []
    for _ in range(4):
        links.attempt("a")
        links.made("a")
        assert not links.beat()
        links.broken("a", proved=True)
        waits.append(beats_until_due(links))
    assert waits == [4, 8, 16, 32]


def test_waits_begin_anew_when_a_link_was_good() -> None:
    for proved, expected in [(True, 4), (False, 8)]:
        links = Relinking(4)
        for _ in range(2):
            links.attempt("a")
            links.made("a")
            for _ in range(20):
                assert not links.beat()
            links.broken("a", proved)
            wait = beats_until_due(links)
        assert wait == expected


def test_only_the_last_attempt_counts() -> None:
    links = Relinking(4)
    first, second, other = links.attempt("a"), links.attempt("a"), links.attempt("b")
    assert not links.is_last("a", first)
    assert links.is_last("a", second)
    assert links.is_last("b", other)
    links.forget("a")
    assert not links.is_last("a", second)
    links.given_up("b")
    assert not any(links.beat() for _ in range(100))
