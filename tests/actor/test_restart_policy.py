"""Which procs start again: the decisions alone, for any order of events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_slurm.actor import RestartPolicy
from monarch_slurm.actor.restart import Restarts, Verdict

COUNT = 5


def verdict(restarted: set[int] = frozenset(), killed: set[int] = frozenset(), given_up: Any = frozenset()) -> Verdict:  # type: ignore[assignment]
    return Verdict(frozenset(restarted), frozenset(killed), frozenset(given_up))


def test_one_for_one() -> None:
    restarts = Restarts(RestartPolicy(max_restarts=2, within=10.0, backoff=1.0), COUNT)
    assert restarts.failed([3], 0.0) == verdict({3})
    assert restarts.start(0.0) == {3}
    assert restarts.failed([3], 1.0) == verdict({3})
    assert restarts.start(1.5) == set()
    assert restarts.next_start() == 2.0
    assert restarts.failed([1], 1.5) == verdict(given_up={1})
    assert restarts.over
    assert restarts.start(2.0) == {3}, "what was granted still starts"
    assert restarts.failed([2], 100.0) == verdict(given_up={2}), "over is over"


def test_one_for_all_waits_until_all_have_ended() -> None:
    restarts = Restarts(RestartPolicy("one_for_all"), 3)
    assert restarts.failed([1], 0.0) == verdict({1}, {0, 2})
    assert restarts.start(0.0) == set()
    assert restarts.next_start() is None
    assert restarts.failed([0], 0.1) == verdict({0})
    assert restarts.start(0.1) == set()
    assert restarts.failed([2], 0.2) == verdict({2})
    assert restarts.start(0.2) == {0, 1, 2}


def test_rest_for_one_takes_in_what_waits_already() -> None:
    restarts = Restarts(RestartPolicy("rest_for_one"), 4)
    assert restarts.failed([2], 0.0) == verdict({2}, {3})
    assert restarts.failed([1], 0.1) == verdict({1})
    assert restarts.start(0.1) == set()
    assert restarts.failed([3], 0.2) == verdict({3})
    assert restarts.start(0.2) == {1, 2, 3}


def test_ranks_that_were_stopped_do_not_start_again() -> None:
    restarts = Restarts(RestartPolicy("one_for_all"), 3)
    restarts.end([2])
    assert restarts.failed([0], 0.0) == verdict({0}, {1})
    restarts.end([1])
    assert restarts.start(0.0) == {0}
    assert restarts.failed([1], 0.0) == verdict()
    assert restarts.left == 1


@dataclass
class World:
    """Procs that fail, are killed, end and start, as the decisions say."""

    policy: RestartPolicy
    now: float = 0.0
    running: set[int] = field(default_factory=lambda: set(range(COUNT)))
    killed: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    granted: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.restarts = Restarts(self.policy, COUNT)

    def fail(self, rank: int) -> None:
        if rank not in self.running | self.killed:
            return
        awaited = rank in self.killed
        result = self.restarts.failed([rank], self.now)
        self.running.discard(rank)
        self.killed.discard(rank)
        assert result.given_up | result.restarted == {rank}
        if awaited:
            assert result == verdict({rank})
        elif rank in result.restarted:
            self.granted.append(self.now)
            affected = self.policy.affected([rank], COUNT)
            assert result.killed == (affected - {rank}) & self.running
        assert result.killed <= self.running
        self.running -= result.killed
        self.killed |= result.killed
        (self.gone if rank in result.given_up else self.ended).add(rank)
        assert self.restarts.over == bool(result.given_up) or self.restarts.over

    def stop(self, rank: int) -> None:
        self.restarts.end([rank])
        for ranks in (self.running, self.killed, self.ended):
            ranks.discard(rank)
        self.gone.add(rank)

    def start(self) -> None:
        started = self.restarts.start(self.now)
        assert started <= self.ended
        self.ended -= started
        self.running |= started


EVENTS = st.lists(
    st.tuples(st.sampled_from(["fail", "fail", "fail", "stop", "start"]), st.integers(0, COUNT - 1), st.floats(0, 3)),
    max_size=60,
)


@pytest.mark.parametrize("strategy", ["one_for_one", "one_for_all", "rest_for_one"])
@given(limit=st.integers(0, 5), backoff=st.sampled_from([0.0, 0.5, 4.0]), events=EVENTS)
def test_any_order_of_events(strategy: Any, limit: int, backoff: float, events: list[tuple[str, int, float]]) -> None:
    world = World(RestartPolicy(strategy, limit, within=10.0, backoff=backoff))
    for kind, rank, seconds in events:
        world.now += seconds
        if kind == "start":
            world.start()
        else:
            getattr(world, kind)(rank)
        for other in (world.killed, world.ended, world.gone):
            assert not world.running & other
    for when in world.granted:
        assert sum(when <= other <= when + 10.0 for other in world.granted) <= max(limit, 0)
    # Once everything that was killed has ended and all waits are over, whatever is not gone runs.
    for rank in list(world.killed):
        world.fail(rank)
    world.now += 1000.0
    world.start()
    assert not world.ended
    assert world.running | world.gone == set(range(COUNT))
    assert world.restarts.next_start() is None
