from __future__ import annotations

from typing import Any

from monarch_slurm.actor.stand_ins import ASKED_FOR, Pool, StandIns
from monarch_slurm.host import HostDown, HostInfo


def host(name: str, incarnation: int = 0) -> HostInfo:
    return HostInfo(f"{name}#{incarnation}", name, name, 1, "127.0.0.1")


def down(name: str, incarnation: int = 0) -> HostDown:
    return HostDown(f"{name}#{incarnation}", name, "gone", 1.0)


def made(**kwargs: Any) -> tuple[StandIns, Pool]:
    desk = StandIns()
    pool = Pool({"a", "b", "s"}, {"a#0", "b#0"}, **kwargs)
    desk.add(pool)
    return desk, pool


def test_a_spare_is_used_once() -> None:
    desk, _ = made()
    assert desk.lost(down("a"), [host("b"), host("s")]) == ("s#0", "s")
    assert desk.lost(down("b"), [host("s")]) is None
    assert desk.lost(down("s"), []) is None
    # Both places are open, and are taken by those that come, in order.
    assert desk.fill([host("a", 1), host("x")], 2.0) == [("b#0", host("a", 1))]
    assert desk.fill([host("a", 1), host("b", 1)], 2.0) == [("s#0", host("b", 1))]
    assert [(item.lost, item.by) for item in desk.replacements] == [("a", "s"), ("b", "a"), ("s", "b")]


def test_what_is_no_spare_takes_no_place() -> None:
    desk, pool = made()
    desk.add(Pool({"c", "s"}, {"c#0", "s#0"}))  # another job uses it
    assert desk.lost(down("x"), [host("s")]) is None
    assert desk.lost(down("a"), [host("s")]) is None
    pool.unfit.add("b")
    assert desk.fill([host("b", 1)], 2.0) == []


def test_a_host_that_was_asked_for_comes_or_not() -> None:
    asked: list[str] = []
    desk, pool = made(on_lost="request", request=lambda down, place: asked.append(place))
    found = desk.lost(down("a"), [])
    assert found is not None
    place, name = found
    assert name == ASKED_FOR
    assert desk.asks(place) is pool
    assert desk.lost(HostDown(place, "?", "it does not come", 1.0), []) is None
    assert desk.asks(place) is None
    assert desk.fill([host("s")], 2.0) == [(place, host("s"))]


def test_a_job_that_has_ended_takes_no_host() -> None:
    desk, pool = made()
    assert desk.retire(["a#0"]) == []
    assert desk.lost(down("a"), [host("s")]) is None
    assert desk.lost(down("b"), []) is None
    assert desk.retire(["b#0"]) == ["b#0"]
    assert desk.fill([host("s")], 2.0) == []
    desk.remove(pool)
    assert desk.lost(down("b"), [host("s")]) is None


def test_a_program_fails_only_if_nobody_takes_the_place() -> None:
    desk, _ = made(on_lost="fail")
    desk.lost(down("a"), [host("s")])
    assert not desk.fails(down("a"))
    desk.lost(down("b"), [])
    assert desk.fails(down("b"))
