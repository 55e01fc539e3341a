"""Quorums of real actors in real processes, which are really killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from support import wait_until

import monarch_slurm.actor as public
from monarch_slurm.actor import Actor, Channel, Future, MeshFailure, PortReceiver, SupervisionError, endpoint, this_host
from monarch_slurm.train.config import TrainConfig
from monarch_slurm.train.events import Event
from monarch_slurm.train.quorum import MemberActor, QuorumActor, RankAnswer, RankAsk
from monarch_slurm.train.quorum_client import QuorumClient
from monarch_slurm.train.quorum_state import EPOCH_SHIFT, MemberRefusedError, UncommittedStepError, member_name

DEADLINE = 60.0
SECRET = b"k" * 32


class PidActor(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Members:
    """A quorum actor, and for each replica a proc with the actor in which its ranks meet."""

    def __init__(self, replicas: int = 3, ranks: int = 1, join_timeout: float = 3600.0) -> None:
        self.config = TrainConfig(replicas=replicas, procs_per_replica=ranks, join_timeout=join_timeout)
        self.events: PortReceiver[Event]
        self._port, self.events = Channel.open()
        self.failures: list[MeshFailure] = []
        self.procs: list[Any] = []
        self.members: list[Any] = []
        self.generations = [0] * replicas
        self.epoch = -1
        self.start_quorum()
        for replica in range(replicas):
            self.members.append(None)
            self.start(replica, 0)

    def start_quorum(self, committed: int = 0) -> None:
        self.epoch += 1
        self.quorum_procs = this_host().spawn_procs(name="quorum")
        self.quorum: Any = self.quorum_procs.spawn(
            "quorum", QuorumActor, self.config, self.epoch, committed, SECRET, self._port
        )
        self.procs.append(self.quorum_procs)

    def start(self, replica: int, generation: int, committed: int = 0) -> None:
        """Do what a supervisor does."""
        procs = this_host().spawn_procs(name=f"member{replica}")
        self.procs.append(procs)
        arguments = (replica, generation, self.config.procs_per_replica, self.quorum, f"store {replica}")
        self.members[replica] = procs.spawn("member", MemberActor, *arguments)
        self.generations[replica] = generation
        self.quorum.register.call_one(replica, generation, committed).get(DEADLINE)

    def ask(self, replica: int, step: int = 0, rank: int = 0, failures: int = 0) -> Future[RankAnswer]:
        ask = RankAsk(step, f"state of {replica} {rank}", False, failures)
        future: Future[RankAnswer] = self.members[replica].quorum.call_one(rank, ask)
        return future

    def all_ask(self, step: int = 0) -> list[RankAnswer]:
        return [future.get(DEADLINE) for future in [self.ask(replica, step) for replica in range(len(self.members))]]

    def kill(self, procs: Any) -> None:
        pid = procs.spawn("pid", PidActor).pid.call_one().get(DEADLINE)
        os.kill(pid, signal.SIGKILL)
        mesh = procs._layout.mesh
        wait_until(lambda: any(mesh in str(failure) for failure in self.failures), f"the end of {mesh}", DEADLINE)


@pytest.fixture
def members() -> Iterator[Any]:
    made: list[Members] = []
    failures: list[MeshFailure] = []
    hook, public.unhandled_fault_hook = public.unhandled_fault_hook, failures.append  # type: ignore[assignment]

    def make(**options: Any) -> Members:
        made.append(Members(**options))
        made[-1].failures = failures
        return made[-1]

    yield make
    for each in made:
        for procs in reversed(each.procs):
            procs.stop().exception(timeout=30.0)
    public.unhandled_fault_hook = hook


def test_a_replica_that_starts_again_gets_the_state_of_another(members: Any) -> None:
    run = members()
    first = run.all_ask()
    assert [answer.rank.replica_rank for answer in first] == [0, 1, 2]
    assert [(answer.rank.heal, answer.donor, answer.metadata) for answer in first] == [(False, "", "")] * 3
    run.quorum.end.broadcast(1, 0)
    asked = [run.ask(replica, 1) for replica in (0, 2)]
    second = [future.get(DEADLINE) for future in asked]  # nobody has waited for replica 1
    assert [answer.rank.replica_world_size for answer in second] == [2, 2]
    run.start(1, 1, committed=1)
    joins = run.ask(1)
    for step in range(2, 1000):  # it may miss some: nobody waits for it
        donor, other = (future.get(DEADLINE) for future in [run.ask(0, step), run.ask(2, step)])
        if donor.rank.replica_world_size == 3:
            break
    joining = joins.get(DEADLINE)
    assert (joining.rank.heal, joining.donor, joining.metadata) == (True, member_name(0, 0), "state of 0 0")
    assert donor.keys.send == {joining.id: joining.keys.receive}
    assert not other.keys.send
    assert donor.rank.recover_dst_replica_ranks == [1]


def test_ranks_of_a_replica_ask_together_and_decide_together(members: Any) -> None:
    run = members(replicas=2, ranks=2)
    asked = [run.ask(replica, rank=rank) for replica, rank in ((0, 0), (0, 1), (1, 0))]
    with pytest.raises(TimeoutError):
        asked[0].get(0.2)
    asked.append(run.ask(1, rank=1))
    answers = [future.get(DEADLINE) for future in asked]
    assert [answer.rank.store_address for answer in answers] == ["store 0", "store 1", "store 0", "store 1"]
    member = run.members[0]
    for votes in ((True, True), (True, False), (True, True)):
        decided = [member.should_commit.call_one(rank, vote) for rank, vote in enumerate(votes)]
        assert [future.get(DEADLINE) for future in decided] == [all(votes)] * 2


def test_a_client_asks_on_any_thread_and_does_something_while_it_waits(members: Any) -> None:
    run = members(replicas=2)
    waited: list[int] = []
    clients = [QuorumClient(run.members[replica], 0, 1, lambda: waited.append(1), 0.01) for replica in (0, 1)]
    timeout = timedelta(seconds=DEADLINE)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(clients[0].quorum, RankAsk(0, "", False, 0), timeout)
        wait_until(lambda: bool(waited), "the client to do something else", DEADLINE)
        second = pool.submit(clients[1].quorum, RankAsk(0, "", False, 0), timeout)
        assert first.result(DEADLINE).rank.quorum_id == second.result(DEADLINE).rank.quorum_id
        assert pool.submit(clients[0].should_commit, True, timeout).result(DEADLINE)
    with pytest.raises(TimeoutError):
        clients[0].quorum(RankAsk(1, "", False, 0), timedelta(seconds=0.1))


def test_a_receiver_is_told_the_hash_that_its_donor_has_announced(members: Any) -> None:
    run = members(replicas=2)
    (donor, receiver) = (QuorumClient(run.members[replica], 0, 1, lambda: None, 0.1) for replica in (0, 1))
    serial = run.all_ask()[0].serial
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(receiver.announced, serial, member_name(0, 0), DEADLINE)
        donor.announce(serial, "abc")
        assert told.result(DEADLINE) == "abc"
        assert receiver.announced(serial, member_name(0, 0), DEADLINE) == "abc"
        told = pool.submit(receiver.announced, serial + 1, member_name(0, 0), DEADLINE)
        with pytest.raises(TimeoutError):
            receiver.announced(serial + 1, member_name(0, 0), 0.1)
        run.quorum.end.broadcast(0, 0)
        with pytest.raises(MemberRefusedError, match="replica_000000:0 has ended before it announced"):
            told.result(DEADLINE)


def test_a_member_that_no_supervisor_has_started_is_refused(members: Any) -> None:
    run = members()
    stranger = run.procs[-1].spawn("stranger", MemberActor, 1, 5, 1, run.quorum)
    with pytest.raises(MemberRefusedError, match="replica_000001:5 may not take part"):
        stranger.quorum.call_one(0, RankAsk(0, "", False, 0)).get(DEADLINE)
    stranger.quorum_moved.call_one(run.quorum).get(DEADLINE)
    assert run.all_ask()[0].rank.replica_world_size == 3


def test_a_step_that_nobody_has_committed_reaches_the_manager_of_the_run(members: Any) -> None:
    run = members()
    run.all_ask()
    with pytest.raises(UncommittedStepError, match="sync 1000000"):
        run.ask(1, 1_000_000).get(DEADLINE)
    told = run.events.recv().get(DEADLINE)
    assert (told["kind"], told["replica"]) == ("quorum_refused", 1)
    assert "replica_000001:0 claims to have the state of sync 1000000" in told["error"]


def test_a_hung_member_is_waited_for_no_longer_than_the_join_timeout(members: Any) -> None:
    run = members(join_timeout=0.2)
    asked = [run.ask(replica) for replica in (0, 2)]
    assert [future.get(DEADLINE).rank.replica_world_size for future in asked] == [2, 2]


def test_the_quorum_actor_is_killed_while_a_replica_dies_and_members_wait(members: Any) -> None:
    run = members()
    first = run.all_ask()[0]
    waiting = [run.ask(replica, 1) for replica in (0, 2)]
    with pytest.raises(TimeoutError):
        waiting[0].get(0.2)  # they wait for replica 1
    run.kill(run.quorum_procs)
    old = run.members[1]
    run.start_quorum(committed=1)
    for replica in (0, 2):
        run.quorum.register.call_one(replica, 0, 1).get(DEADLINE)
        run.members[replica].quorum_moved.broadcast(run.quorum)
    run.start(1, 1, committed=1)  # its first trainers have died meanwhile
    second = [future.get(DEADLINE) for future in waiting]
    assert [answer.rank.replica_ids for answer in second] == [[member_name(0, 0), member_name(2, 0)]] * 2
    assert second[0].rank.quorum_id >> EPOCH_SHIFT == 1
    assert second[0].rank.quorum_id != first.rank.quorum_id
    old.quorum_moved.broadcast(run.quorum)  # it was not dead after all, and is refused all the same
    with pytest.raises(MemberRefusedError, match="the supervisor runs generation 1 of it"):
        old.quorum.call_one(0, RankAsk(1, "", False, 0)).get(DEADLINE)


def test_who_has_missed_an_answer_gets_it_from_what_others_report(members: Any) -> None:
    run = members(replicas=2)
    run.all_ask()
    # Replica 1 has had an answer for step 1; that of replica 0 went down with the actor.
    other = run.procs[-1].spawn("other", MemberActor, 0, 0, 1, run.quorum)
    lost, got = other.quorum.call_one(0, RankAsk(1, "state of 0 0", False, 0)), run.ask(1, 1)
    assert lost.get(DEADLINE).serial == got.get(DEADLINE).serial
    run.kill(run.quorum_procs)
    asked = run.ask(0, 1)  # of an actor that does not answer any more
    run.start_quorum(committed=1)
    for replica in (0, 1):
        run.quorum.register.call_one(replica, 0, 1).get(DEADLINE)
        run.members[replica].quorum_moved.broadcast(run.quorum)
    answer = asked.get(DEADLINE)
    assert (answer.serial, answer.rank.quorum_id) == (got.get().serial, got.get().rank.quorum_id)


def test_a_rank_hears_of_the_end_of_rank_0(members: Any) -> None:
    run = members()
    asked = run.ask(0)
    run.kill(run.procs[1])
    with pytest.raises(SupervisionError):
        asked.get(DEADLINE)
