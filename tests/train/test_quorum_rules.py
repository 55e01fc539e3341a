"""The rules of quorums, beside TorchFT's own Lighthouse and manager servers on random histories."""

from __future__ import annotations

import dataclasses
import os
import re
import time
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch_slurm.train.quorum_rules import (
    Asking,
    Member,
    Quorum,
    RankQuorum,
    Waiting,
    decide,
    for_rank,
    quorum_of,
)

os.environ.setdefault("RUST_LOG", "warn")
os.environ.setdefault("TOKIO_WORKER_THREADS", "1")

NEVER = 3_600_000
"""Milliseconds: a time-out that no test reaches."""

DEADLINE = 60.0
"""Seconds after which a test gives up; nothing takes this long unless it fails."""


@dataclass(frozen=True)
class Ask:
    """What the ranks of a replica ask for."""

    step: int
    shrink_only: bool = False
    commit_failures: int = 0


class TorchFT:
    """TorchFT's own servers: a Lighthouse, and a manager server with a client per rank for each replica."""

    def __init__(self, ids: list[str], ranks: int, min_replicas: int, join_ms: int, heartbeat_ms: int = NEVER) -> None:
        from torchft._torchft import ManagerClient, ManagerServer
        from torchft.coordination import LighthouseServer

        self._ranks = ranks
        self._server = LighthouseServer("127.0.0.1:0", min_replicas, join_ms, 10, heartbeat_ms)
        self.url = f"http://127.0.0.1:{self._server.address().rsplit(':', 1)[1]}"
        seconds = timedelta(seconds=DEADLINE)
        self.managers = {
            name: ManagerServer(
                name,
                self.url,
                "127.0.0.1",
                "127.0.0.1:0",
                f"store-{name}",
                ranks,
                timedelta(milliseconds=20),
                seconds,
                0,
            )
            for name in ids
        }
        self.addresses = {name: manager.address() for name, manager in self.managers.items()}
        self._clients = {
            name: [ManagerClient(address, seconds) for _ in range(ranks)] for name, address in self.addresses.items()
        }
        self._pool = ThreadPoolExecutor(len(ids) * ranks)
        self._waiting: set[str] = set()
        self.wait(lambda: self._heartbeating() == len(ids), "all replicas to send heartbeats")

    def close(self) -> None:
        for manager in self.managers.values():
            manager.shutdown()
        self._server.shutdown()
        self._pool.shutdown(wait=False)

    def ask(self, name: str, ask: Ask, init_sync: bool) -> list[Future[Any]]:
        """Have all ranks of a replica ask; return when the Lighthouse has heard of it."""
        futures = [
            self._pool.submit(
                self._clients[name][rank]._quorum,
                group_rank=rank,
                step=ask.step,
                checkpoint_metadata=f"state of {name} {rank}",
                shrink_only=ask.shrink_only,
                timeout=timedelta(seconds=DEADLINE),
                commit_failures=ask.commit_failures,
                init_sync=init_sync,
            )
            for rank in range(self._ranks)
        ]
        self._waiting.add(name)
        self.wait(lambda: futures[0].done() or self._asking() == len(self._waiting), f"{name} to be heard")
        return futures

    def answered(self, ids: tuple[str, ...], left: int) -> None:
        """Note that ``ids`` have an answer; return when the others, ``left``, ask again."""
        self._waiting -= set(ids)
        self.wait(lambda: self._asking() == left, "those who were left out to ask again")

    def wait(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < deadline, f"waited {DEADLINE} s for {what}: {self._status()}"
            time.sleep(0.002)

    def _status(self) -> str:
        with urllib.request.urlopen(f"{self.url}/status", timeout=DEADLINE) as answer:
            return str(answer.read().decode())

    def _asking(self) -> int:
        return int(re.search(r"\[\d+/(\d+) participants", self._status())[1])  # type: ignore[index]

    def _heartbeating(self) -> int:
        return int(re.search(r"\[(\d+) heartbeating\]", self._status())[1])  # type: ignore[index]


def told(result: Any) -> dict[str, Any]:
    return {field.name: getattr(result, field.name) for field in dataclasses.fields(RankQuorum)}


asks = st.builds(
    Ask,
    step=st.integers(0, 3),
    shrink_only=st.sampled_from([False, False, False, True]),
    commit_failures=st.sampled_from([0, 0, 0, 1]),
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    ids=st.lists(st.text("ab01_", min_size=1, max_size=3), min_size=1, max_size=4, unique=True),
    ranks=st.integers(1, 2),
    min_replicas=st.integers(1, 3),
    waits=st.booleans(),
    init_sync=st.booleans(),
    history=st.lists(st.tuples(st.integers(0, 3), asks), max_size=14),
)
def test_quorums_are_those_of_torchft(
    ids: list[str], ranks: int, min_replicas: int, waits: bool, init_sync: bool, history: list[tuple[int, Ask]]
) -> None:
    theirs = TorchFT(ids, ranks, min_replicas, NEVER if waits else 0)
    asking: dict[str, Asking] = {}
    futures: dict[str, list[Future[Any]]] = {}
    previous: Quorum | None = None
    try:
        for who, ask in history:
            name = ids[who % len(ids)]
            if name in asking:
                continue
            member = Member(name, ask.step, ranks, ask.shrink_only, ask.commit_failures, f"store-{name}")
            asking[name] = Asking(member, 0.0)
            verdict = decide(asking, set(ids), previous, min_replicas, NEVER if waits else 0.0, 0.0)
            shrunk = previous is not None and any(asked.member.shrink_only for asked in asking.values())
            if isinstance(verdict, Waiting) and shrunk and len(asking) >= min_replicas:
                return  # TorchFT may form a quorum of too few here
            futures[name] = theirs.ask(name, ask, init_sync)
            if isinstance(verdict, Waiting):
                assert not futures[name][0].done(), verdict
                continue
            previous = quorum_of(verdict, previous, previous.id + 1 if previous is not None else 1, 0)
            for answered in previous.ids:
                for rank, future in enumerate(futures.pop(answered)):
                    ours = for_rank(previous, answered, rank, init_sync)
                    got = future.result(DEADLINE)
                    assert told(got) == dataclasses.asdict(ours)
                    source = ours.recover_src_replica_rank
                    donor = theirs.addresses[previous.ids[source]] if source is not None else ""
                    assert got.recover_src_manager_address == donor
                del asking[answered]
            theirs.answered(previous.ids, len(asking))
    finally:
        theirs.close()


@pytest.mark.slow
def test_who_is_dead_is_left_out_as_by_torchft() -> None:
    ids = ["a", "b", "c", "d"]
    theirs = TorchFT(ids, 1, 2, NEVER, heartbeat_ms=3000)
    try:
        first = [theirs.ask(name, Ask(0), False) for name in ids]
        (results,) = zip(*[[f.result(DEADLINE) for f in found] for found in first], strict=True)
        assert [result.replica_world_size for result in results] == [4] * 4
        theirs.answered(tuple(ids), 0)
        for dead in ("b", "d"):
            theirs.managers[dead].shutdown()
        later = {name: theirs.ask(name, Ask(step), False)[0] for name, step in (("c", 1), ("a", 0))}
        previous = quorum_of(tuple(Member(name, 0) for name in ids), None, 1, 1)
        asking = {name: Asking(Member(name, step, store=f"store-{name}"), 0.0) for name, step in (("c", 1), ("a", 0))}
        assert isinstance(decide(asking, ids, previous, 2, 10.0, 0.0), Waiting)
        verdict = decide(asking, ["a", "c"], previous, 2, 10.0, 0.0)
        assert not isinstance(verdict, Waiting)
        quorum = quorum_of(verdict, previous, 2, 2)
        for name, future in later.items():
            assert told(future.result(DEADLINE)) == dataclasses.asdict(for_rank(quorum, name, 0))
    finally:
        theirs.close()


def asking(*ids: str, since: float = 0.0) -> dict[str, Asking]:
    return {name: Asking(Member(name, 0), since) for name in ids}


def quorum(*ids: str) -> Quorum:
    return quorum_of(tuple(Member(name, 0) for name in ids), None, 1, 1)


def test_a_quorum_waits_for_the_living_until_the_join_timeout() -> None:
    late = asking("a", "b")
    verdict = decide(late, {"a", "b", "c"}, None, 2, 10.0, 9.9)
    assert isinstance(verdict, Waiting)
    assert (verdict.reason, verdict.until) == ("waiting for c", 10.0)
    assert [member.id for member in decide(late, {"a", "b", "c"}, None, 2, 10.0, 10.0)] == ["a", "b"]  # type: ignore[union-attr]


def test_a_quorum_of_all_members_before_waits_for_nobody_else() -> None:
    found = decide(asking("a", "b", "d"), {"a", "b", "c", "d"}, quorum("a", "b"), 2, 10.0, 0.0)
    assert [member.id for member in found] == ["a", "b", "d"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("ask", "alive", "least", "reason"),
    [
        ("a", "ab", 2, "1 of at least 2 replicas ask for a quorum"),
        ("ab", "abcd", 2, "2 of 4 living replicas ask for a quorum; more than half are needed"),
        ("ab", "a", 2, "1 of at least 2 replicas ask for a quorum"),
    ],
)
def test_too_few(ask: str, alive: str, least: int, reason: str) -> None:
    assert decide(asking(*ask), set(alive), quorum(*"abcd"), least, 10.0, 99.0) == Waiting(reason)


def test_shrinking_to_fewer_than_the_minimum_is_no_quorum() -> None:
    found = {"a": Asking(Member("a", 0, shrink_only=True), 0.0), **asking("c")}
    assert isinstance(decide(found, {"a", "c"}, quorum("a", "b"), 2, 0.0, 0.0), Waiting)


def test_ids_change_with_the_members_and_after_a_failure() -> None:
    first = quorum("a", "b")
    again = quorum_of((Member("a", 1), Member("b", 1)), first, 2, 2)
    assert (again.id, again.serial) == (1, 2)
    assert quorum_of((Member("a", 1), Member("b", 1, commit_failures=1)), first, 2, 2).id == 2
    assert quorum_of((Member("a", 1), Member("c", 1)), first, 2, 2).id == 2


def test_only_quorums_in_which_somebody_heals_say_where_states_are() -> None:
    a, b = Member("a", 1, metadata=("here",)), Member("b", 1, metadata=("there",))
    assert quorum_of((a, b), None, 1, 1).members[0].metadata == ()
    assert quorum_of((a, dataclasses.replace(b, step=0)), None, 1, 1).members[0].metadata == ("here",)


def test_a_stranger_is_in_no_quorum() -> None:
    with pytest.raises(ValueError, match="not in tuple"):
        for_rank(quorum("a", "b"), "c", 0)
