"""Who counts as alive, who may ask, and what an actor that takes the place of another one makes of what it is told."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_slurm.train.quorum_rules import Member, Quorum
from monarch_slurm.train.quorum_state import (
    EPOCH_SHIFT,
    MemberRefusedError,
    QuorumState,
    UncommittedStepError,
    member_name,
    parse_member_name,
)

NOTHING = (-1, -1)
SECRET = b"s" * 32


def make(replicas: int = 3, epoch: int = 0, committed: int = 0) -> QuorumState:
    return QuorumState(replicas, 2, 10.0, epoch=epoch, committed_step=committed, secret=SECRET)


def started(replicas: int = 3) -> QuorumState:
    state = make(replicas)
    for replica in range(replicas):
        state.register(replica, 0, 0)
    return state


def ask(
    state: QuorumState,
    replica: int,
    step: int = 0,
    generation: int = 0,
    held: tuple[int, int] = NOTHING,
    now: float = 0.0,
    failures: int = 0,
) -> None:
    name = member_name(replica, generation)
    metadata = (f"state of {replica}",)
    state.ask(replica, generation, Member(name, step, commit_failures=failures, metadata=metadata), held, now)


def first_quorum(state: QuorumState, replicas: int = 3) -> Quorum:
    for replica in range(replicas):
        ask(state, replica)
    answers = state.settle(0.0).answers
    assert len(answers) == replicas
    return next(iter(answers.values())).quorum


def known(quorum: Quorum) -> tuple[int, int]:
    return quorum.id, quorum.serial


def test_names_sort_as_replicas_do() -> None:
    names = [member_name(replica, 7) for replica in (2, 10, 100_000)]
    assert names == sorted(names)
    assert parse_member_name(names[1]) == (10, 7)


def test_the_first_quorum_waits_for_all_replicas_of_the_run() -> None:
    state = make()
    state.register(0, 0, 0)
    state.register(1, 0, 0)
    ask(state, 0)
    ask(state, 1)
    waiting = state.settle(0.0).waiting
    assert waiting is not None
    assert waiting.reason == "waiting for replica_000002:0"  # whose supervisor has not even been heard of
    assert len(state.settle(10.0).answers) == 2


def test_a_replica_that_starts_again_holds_nobody_up() -> None:
    state = started()
    first = first_quorum(state)
    ask(state, 0, 1, held=known(first))
    ask(state, 2, 1, held=known(first))
    assert state.settle(0.0).answers == {}  # replica 1 lives, and is waited for
    state.end(1, 0)
    state.register(1, 1, 1)
    second = state.settle(0.0).answers[member_name(0, 0)].quorum
    assert second.ids == (member_name(0, 0), member_name(2, 0))
    assert second.id != first.id
    ask(state, 1, 0, generation=1)
    assert state.settle(0.0).answers == {}
    for replica in (0, 2):
        ask(state, replica, 2, held=known(second))
    third = state.settle(0.0).answers
    assert len(third) == 3
    assert third[member_name(0, 0)].quorum.member(member_name(1, 1)) is not None


def test_a_start_that_failed_before_the_first_quorum_holds_nobody_up() -> None:
    state = started()
    state.end(2, 0)
    state.register(2, 1, 0)
    ask(state, 0)
    ask(state, 1)
    assert len(state.settle(0.0).answers) == 2


def test_who_dies_while_it_asks_is_forgotten() -> None:
    state = started()
    ask(state, 0)
    state.register(0, 1, 0)
    ask(state, 1)
    ask(state, 2)
    assert set(state.settle(0.0).answers) == {member_name(1, 0), member_name(2, 0)}


def ask_after_a_restart(state: QuorumState, first: Quorum) -> None:
    """Replica 2 has started again and asks without a state; the others have committed a sync since ``first``."""
    state.register(2, 1, 1)
    for replica in (0, 1):
        ask(state, replica, 1, held=known(first))
    ask(state, 2, 0, generation=1)


def test_keys_are_for_donor_and_receiver_alone() -> None:
    state = started()
    first = first_quorum(state)
    ask_after_a_restart(state, first)
    answers = state.settle(0.0).answers
    names = [member_name(0, 0), member_name(1, 0), member_name(2, 1)]
    donor, bystander, receiver = (answers[name].keys[0] for name in names)
    assert donor.send == {names[2]: receiver.receive}
    assert len(receiver.receive) == 32
    assert (dict(bystander.send), bystander.receive, dict(receiver.send)) == ({}, b"", {})
    assert receiver.receive.hex() not in repr(answers)
    assert answers[names[2]].quorum.members[0].metadata == ("state of 0",)


def test_keys_differ_from_quorum_to_quorum() -> None:
    state = started(2)
    held, keys = NOTHING, []
    for step in range(4):
        ask(state, 0, step, held=held)
        ask(state, 1, 0, held=held, failures=1)
        answers = state.settle(0.0).answers
        held = known(answers[member_name(0, 0)].quorum)
        keys += [found.receive for found in answers[member_name(1, 0)].keys]
    assert len(set(keys)) == 3


@pytest.mark.parametrize(
    ("replica", "generation", "text"),
    [
        (7, 0, "replica_000007:0 may not take part: no supervisor has started replica 7"),
        (1, 3, "replica_000001:3 may not take part: the supervisor runs generation 0 of it"),
        (2, 0, "replica_000002:0 may not take part: the supervisor runs generation 1 of it"),
        (0, 0, "replica_000000:0 may not take part: its supervisor has reported its end"),
    ],
)
def test_who_is_not_registered_is_refused(replica: int, generation: int, text: str) -> None:
    state = started()
    state.register(2, 1, 0)
    state.end(0, 0)
    with pytest.raises(MemberRefusedError, match=text):
        ask(state, replica, generation=generation)


def test_a_step_that_nobody_has_committed_is_refused() -> None:
    state = started()
    with pytest.raises(UncommittedStepError, match="claims to have the state of sync 1, but"):
        ask(state, 0, 1)
    first = first_quorum(state)
    with pytest.raises(UncommittedStepError, match="1000000"):
        ask(state, 0, 1_000_000, held=known(first))
    ask(state, 0, 1, held=known(first))


def test_a_run_that_continues_knows_its_step() -> None:
    state = make(committed=40)
    state.register(0, 5, 40)
    ask(state, 0, 40, generation=5)
    with pytest.raises(UncommittedStepError):
        ask(state, 0, 41, generation=5)


def test_a_member_that_comes_too_late_is_in_the_next_quorum() -> None:
    state = started()
    ask(state, 0)
    ask(state, 1)
    first = state.settle(10.0).answers[member_name(0, 0)].quorum
    ask(state, 2, now=11.0)
    assert state.settle(30.0).answers == {}
    for replica in (0, 1):
        ask(state, replica, 1, held=known(first), now=30.0)
    assert len(state.settle(30.0).answers) == 3


def test_a_new_actor_waits_for_members_whose_supervisors_it_has_not_heard_of() -> None:
    first = first_quorum(started())
    state = make(epoch=1, committed=0)
    state.register(0, 0, 0)
    state.register(1, 0, 0)
    state.report(0, 0, first)
    for replica in (0, 1):
        ask(state, replica, 1, held=known(first))
    waiting = state.settle(0.0).waiting
    assert waiting is not None
    assert waiting.reason == "waiting for replica_000002:0"
    state.register(2, 1, 1)
    second = state.settle(0.0).answers[member_name(0, 0)].quorum
    assert second.id >> EPOCH_SHIFT == second.serial >> EPOCH_SHIFT == 1


def test_the_same_members_keep_their_process_group_across_actors() -> None:
    first = first_quorum(started())
    state = make(epoch=1)
    for replica in range(3):
        state.register(replica, 0, 1)
        state.report(replica, 0, first)
        ask(state, replica, 1, held=known(first))
    assert state.settle(0.0).answers[member_name(0, 0)].quorum.id == first.id


def test_a_lost_answer_is_given_again_with_the_same_keys() -> None:
    state = started()
    first = first_quorum(state)
    ask_after_a_restart(state, first)
    lost = state.settle(0.0).answers  # which only replica 1 has got
    after = make(epoch=1, committed=1)
    for replica, generation in ((0, 0), (1, 0), (2, 1)):
        after.register(replica, generation, 1)
    ask(after, 0, 1, held=known(first))
    assert after.settle(0.0).answers == {}
    after.report(0, 0, first)
    assert after.settle(0.0).answers == {}
    after.report(1, 0, lost[member_name(1, 0)].quorum)
    assert after.settle(0.0).answers == {member_name(0, 0): lost[member_name(0, 0)]}
    ask(after, 2, 0, generation=1)
    assert after.settle(0.0).answers == {member_name(2, 1): lost[member_name(2, 1)]}


def test_a_lost_answer_is_of_no_use_to_who_asks_with_something_else() -> None:
    first = first_quorum(started())
    after = make(epoch=1)
    for replica in range(3):
        after.register(replica, 0, 1)
    after.report(1, 0, first)
    ask(after, 0, 0, held=NOTHING, failures=1)
    assert after.settle(0.0).answers == {}


events = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 3)),
        st.tuples(st.just("ask"), st.integers(0, 3)),
        st.tuples(st.just("ask"), st.integers(0, 3)),
        st.tuples(st.just("die"), st.integers(0, 3)),
        st.tuples(st.just("crash"), st.integers(0, 15)),
        st.tuples(st.just("time"), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(history=events, data=st.data())
def test_no_id_is_ever_used_for_other_members(history: list[tuple[str, int]], data: st.DataObject) -> None:
    """Replicas ask, commit or fail, and die; actors crash in the middle of an answer, which some get and others not."""
    replicas, epochs = 4, itertools.count(1)
    state, now, committed = started(replicas), 0.0, 0
    generation = dict.fromkeys(range(replicas), 0)
    last: dict[int, Quorum] = {}
    asked: dict[int, tuple[int, int]] = {}
    steps, failures = dict.fromkeys(range(replicas), 0), dict.fromkeys(range(replicas), 0)
    groups: dict[int, tuple[str, ...]] = {}
    serials: dict[int, tuple[str, ...]] = {}

    def tell(replica: int) -> None:
        held = known(last[replica]) if replica in last else NOTHING
        ask(state, replica, steps[replica], generation[replica], held, now, failures[replica])

    def take(reach: set[int]) -> None:
        nonlocal committed
        for name, answer in state.settle(now).answers.items():
            replica, start = parse_member_name(name)
            assert start == generation[replica]
            quorum = answer.quorum
            assert groups.setdefault(quorum.id, quorum.ids) == quorum.ids
            assert serials.setdefault(quorum.serial, quorum.ids) == quorum.ids
            if replica not in reach:
                continue  # the actor has crashed before this one was sent
            del asked[replica]
            last[replica] = quorum
            if data.draw(st.booleans()):
                steps[replica], failures[replica] = quorum.max_step + 1, 0
                committed = max(committed, steps[replica])
            else:
                steps[replica], failures[replica] = quorum.max_step, failures[replica] + 1

    for kind, number in history:
        now += 0.1
        if kind == "ask" and number not in asked:
            asked[number] = (number, generation[number])
            tell(number)
            take(set(range(replicas)))
        elif kind == "die":
            state.end(number, generation[number])
            generation[number] += 1
            steps[number], failures[number] = 0, 0
            asked.pop(number, None)
            last.pop(number, None)
            state.register(number, generation[number], committed)
            take(set(range(replicas)))
        elif kind == "time":
            now += 10.0
            take(set(range(replicas)))
        elif kind == "crash":
            for replica in data.draw(st.permutations(range(replicas))):
                if replica not in asked and data.draw(st.integers(0, 3)):
                    asked[replica] = (replica, generation[replica])
                    tell(replica)
            take({replica for replica in range(replicas) if number >> replica & 1})
            state = QuorumState(replicas, 2, 10.0, epoch=next(epochs), committed_step=committed, secret=SECRET)
            for replica in data.draw(st.permutations(range(replicas))):
                state.register(replica, generation[replica], committed)
                if replica in last:
                    state.report(replica, generation[replica], last[replica])
                if replica in asked:
                    tell(replica)
                take(set(range(replicas)))
