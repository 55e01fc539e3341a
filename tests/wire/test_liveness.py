from __future__ import annotations

from monarch_slurm.wire import Liveness


def test_a_peer_that_is_silent_for_too_long_is_dead_once() -> None:
    liveness = Liveness(interval=1.0, missed=3)
    liveness.heard("a", 0.0)
    liveness.heard("b", 2.0)
    assert liveness.dead(3.0) == []
    assert liveness.silence("a", 3.0) == 3.0
    assert liveness.dead(3.1) == ["a"]
    assert liveness.dead(3.1) == []
    assert liveness.dead(5.5) == ["b"]


def test_a_peer_that_is_heard_again_is_watched_again() -> None:
    liveness = Liveness(1.0, 3)
    liveness.heard("a", 0.0)
    liveness.heard("a", 3.0)
    assert liveness.dead(5.0) == []
    assert liveness.dead(6.5) == ["a"]


def test_who_is_forgotten_does_not_die() -> None:
    liveness = Liveness(1.0, 3)
    liveness.heard("a", 0.0)
    liveness.forget("a")
    liveness.forget("never heard of")
    assert liveness.dead(100.0) == []


def test_nobody_dies_of_the_watchers_own_sleep() -> None:
    liveness = Liveness(1.0, 3)
    liveness.heard("a", 0.0)
    liveness.overslept(10.0)
    assert liveness.dead(12.0) == []
    assert liveness.dead(13.5) == ["a"]
