from __future__ import annotations

import logging
import os
import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import wait_until

from monarch_slurm.wire import admission
from monarch_slurm.wire.admission import PROOF_SECONDS, Admission, StrangerLog
from monarch_slurm.wire.origin import Origin

FAR, OTHER_FAR, OWN = Origin("10.0.0.7"), Origin("10.0.0.8"), Origin("127.0.0.1", os.getuid())


def keys(entries: list[tuple[int, Origin]]) -> list[int]:
    return [key for key, _ in entries]


def test_the_oldest_of_an_origin_makes_room() -> None:
    door: Admission[int] = Admission(per_origin=2, total=100)
    assert [keys(door.enter(number, FAR, number)) for number in range(4)] == [[], [], [0], [1]]
    assert door.enter(9, OTHER_FAR, 9) == []
    assert len(door) == 3


def test_where_all_is_full_the_origin_with_most_makes_room() -> None:
    door: Admission[int] = Admission(per_origin=100, total=3)
    for number in range(3):
        assert door.enter(number, FAR, 0) == []
    assert door.enter(3, OTHER_FAR, 0) == [(0, FAR)]
    assert door.enter(4, FAR, 0) == [(1, FAR)]


def test_among_equals_those_that_were_first_stay() -> None:
    door: Admission[int] = Admission(per_origin=100, total=3)
    for number in range(3):
        assert door.enter(number, Origin(f"10.0.0.{number}"), 0) == []
    assert keys(door.enter(3, Origin("10.0.0.3"), 0)) == [3]
    assert len(door) == 3


def test_processes_of_this_user_have_no_limit_but_the_time() -> None:
    door: Admission[int] = Admission(per_origin=1, total=1)
    assert [door.enter(number, OWN, 0) for number in range(5)] == [[]] * 5
    assert door.enter(5, FAR, 0) == []
    assert keys(door.overdue(PROOF_SECONDS)) == [0, 1, 2, 3, 4, 5]


def test_time_is_up() -> None:
    door: Admission[int] = Admission()
    assert door.seconds_left(0) is None
    door.enter(1, FAR, 0)
    door.enter(2, FAR, 4)
    assert door.seconds_left(3) == PROOF_SECONDS - 3
    assert door.overdue(PROOF_SECONDS - 1) == []
    assert door.overdue(PROOF_SECONDS) == [(1, FAR)]
    assert door.forget(2) == FAR
    assert door.forget(2) is None
    assert door.overdue(1000) == []


def test_who_has_a_proof_stays_although_nobody_has_said_so_yet() -> None:
    proved = {0, 2}
    door: Admission[int] = Admission(per_origin=1, is_proved=proved.__contains__)
    door.enter(0, FAR, 0)
    assert door.enter(1, FAR, 0) == []
    assert keys(door.enter(2, FAR, 0)) == [1]
    assert door.overdue(1000) == []
    assert len(door) == 0


def test_few_descriptors_lower_the_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
    try:
        door: Admission[int] = Admission(per_origin=1000, total=1000)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [number for number in range(101) if door.enter(number, FAR, 0)] == [100]


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from([*"abcdef", "own"]), st.booleans()), max_size=200))
def test_any_history(steps: list[tuple[int, str, bool]]) -> None:
    """No limit is passed, each connection is closed once, and an origin with few is never closed for others' many."""
    door: Admission[int] = Admission(per_origin=4, total=10)
    here: dict[int, Origin] = {}
    for key, name, enters in steps:
        if not enters:
            assert (door.forget(key) is not None) == (key in here)
            here.pop(key, None)
            continue
        origin = OWN if name == "own" else Origin(name)
        closed = door.enter(key, origin, 0)
        here[key] = origin
        sizes = {one: sum(other == one for other in here.values()) for one in here.values()}
        for victim, of in closed:
            assert here.pop(victim) == of
            assert not of.is_own
            assert sizes[of] == max(sizes.values()) or sizes[of] > 4 or victim == key
        limited = [one for one in here.values() if not one.is_own]
        assert len(limited) <= 10
        assert all(limited.count(one) <= 4 for one in limited)
        assert len(door) == len(here)


def test_one_line_tells_of_a_flood(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "GATHER_SECONDS", 3600.0)
    now = [0.0]
    log = StrangerLog("the test's port", "do not hold its key", clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for number in range(500):
            log.note(Origin("10.0.0.7") if number % 5 else Origin("127.0.0.1", 1001, number))
        log.note(Origin("10.0.0.9"), "not a greeting")
        now[0] = 2.0
        log.flush()
        assert caplog.messages == [
            "refused 501 connections at the test's port in 2 s that do not hold its key: 400 from 10.0.0.7, 100 from "
            "127.0.0.1 (uid 1001), 1 from 10.0.0.9 (not a greeting)"
        ]
        log.flush()
        for number in range(9):
            log.note(Origin(f"10.0.1.{number}"))
        log.flush()
    assert caplog.messages[1].endswith("1 from 10.0.1.3, 5 more origins")
    assert log.refused == 510


def test_a_single_stranger_is_told_of_without_another(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "GATHER_SECONDS", 0.01)
    log = StrangerLog("the test's port", "do not hold its key")
    with caplog.at_level(logging.WARNING):
        log.note(FAR)
        wait_until(lambda: caplog.messages, "the line comes")
    assert caplog.messages == [
        "refused 1 connection at the test's port in 1 s that do not hold its key: 1 from 10.0.0.7"
    ]
