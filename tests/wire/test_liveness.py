from __future__ import annotations

from monarch_slurm.wire import Liveness


def watch(machine_limit: float = 3.0, peer_limit: float = 60.0) -> Liveness:
    return Liveness(machine_limit, peer_limit)


def test_a_peer_whose_machine_is_silent_is_lost_once() -> None:
    liveness = watch()
    liveness.heard("a", 0.0)
    liveness.heard("b", 2.0)
    assert liveness.lost(3.0) == []
    assert liveness.lost(3.1) == [("a", False)]
    assert liveness.lost(3.1) == []
    assert liveness.lost(5.5) == [("b", False)]


def test_a_peer_that_is_heard_again_is_watched_again() -> None:
    liveness = watch()
    liveness.heard("a", 0.0)
    liveness.heard("a", 3.0)
    assert liveness.lost(5.0) == []
    assert liveness.lost(6.5) == [("a", False)]


def test_a_stopped_peer_on_a_machine_that_answers_has_a_limit_of_its_own() -> None:
    liveness = watch()
    liveness.heard("a", 0.0)
    for second in range(1, 61):
        liveness.answered("a", second - 0.2)
        assert liveness.lost(float(second)) == []
    assert liveness.lost(60.1) == [("a", True)]


def test_a_stopped_peer_whose_machine_is_cut_off_is_lost_by_the_limit_of_the_machine() -> None:
    liveness = watch()
    liveness.heard("a", 0.0)
    liveness.answered("a", 10.0)
    assert liveness.lost(13.0) == []
    assert liveness.lost(13.1) == [("a", False)]


def test_an_old_answer_takes_nothing_back() -> None:
    liveness = watch()
    liveness.heard("a", 10.0)
    liveness.answered("a", 2.0)
    assert liveness.lost(12.0) == []


def test_the_limit_of_a_peer_is_never_below_that_of_its_machine() -> None:
    liveness = watch(3.0, 1.0)
    liveness.heard("a", 0.0)
    liveness.answered("a", 2.0)
    assert liveness.lost(2.9) == []
    assert liveness.lost(3.1) == [("a", True)]


def test_whose_machine_is_to_be_looked_at() -> None:
    liveness = watch()
    liveness.heard("a", 0.0)
    liveness.heard("b", 1.5)
    assert liveness.silent(2.0, 1.0) == ["a"]


def test_who_is_forgotten_is_not_lost() -> None:
    liveness = watch()
    liveness.heard("a", 0.0)
    liveness.forget("a")
    liveness.forget("never heard of")
    assert liveness.lost(100.0) == []
    assert liveness.silent(100.0, 1.0) == []
