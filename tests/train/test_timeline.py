"""Timelines, stalls and curves over synthetic runs."""

from __future__ import annotations

import itertools
import random

import pytest
from run_events import (
    DETECTION,
    HANG_DEADLINE,
    HEARTBEAT,
    RESPAWN,
    START,
    SYNC,
    T0,
    TICK,
    TRACEBACK,
    eventful,
    fail_at,
    simulate,
)

from monarch_slurm.train import curves
from monarch_slurm.train.event_index import EventIndex
from monarch_slurm.train.timeline import STAGES, failures


def ev(kind, t, replica=None, generation=0, **fields):
    where = {} if replica is None else {"replica": replica, "generation": generation}
    return {"kind": kind, "t": T0 + t, **where, **fields}


def started(*replicas):
    return [ev("trainer_started", 0, r, rank=0, host=f"n{r}", pid=r) for r in replicas]


def asked_and_formed(replica, asked, formed, *, generation=0, step=1, quorum_id=1, rank=0, **more):
    more = {"participants": 3, "healing": False, **more}
    return [
        ev("quorum_asked", asked, replica, generation, rank=rank, step=step),
        ev(
            "quorum",
            formed,
            replica,
            generation,
            rank=rank,
            step=step,
            quorum_id=quorum_id,
            seconds=formed - asked,
            **more,
        ),
    ]


def first_quorum(*replicas, formed=1.0):
    return [e for r in replicas for e in asked_and_formed(r, formed - 0.5, formed, step=0)]


def only(events):
    found = failures(events)
    assert len(found) == 1
    return found[0]


class TestStages:
    def test_a_run_without_failures_has_no_timeline(self):
        assert failures(simulate()) == []

    def test_no_events(self):
        assert failures([]) == []

    @pytest.mark.parametrize(
        ("kind", "exit_text"),
        [("kill", "Killed(sig=9)"), ("segfault", "Killed(sig=11)"), ("exception", "Exited(code=1)")],
    )
    def test_each_stage_is_timed_from_the_injection(self, kind, exit_text):
        events = simulate(fail_at(2, 7.0, kind))
        f = only(events)
        assert (f.type, f.replica, f.rank, f.host, f.exit, f.failure) == (kind, 2, 0, "node03", exit_text, 1)
        assert f.injected == f.start == T0 + 7.0
        assert f.seconds["detected"] == pytest.approx(DETECTION, abs=1e-5)
        assert f.seconds["respawned"] == pytest.approx(DETECTION + RESPAWN + START, abs=1e-5)
        joined = next(e["t"] for e in events if e["kind"] == "quorum" and e["replica"] == 2 and e["generation"] == 1)
        assert f.times["joined"] == joined
        assert f.times["state_received"] == pytest.approx(joined + 0.12)
        assert f.times["first_commit"] == pytest.approx(joined + SYNC)
        assert (f.outcome, f.new_generation, f.respawn_level, f.attempts) == ("recovered", 1, "mesh", 1)

    def test_a_hang_is_detected_when_its_deadline_is_over(self):
        f = only(simulate(fail_at(0, 7.0, "hang")))
        assert f.seconds["detected"] == pytest.approx(HANG_DEADLINE, abs=1e-5)
        assert f.seconds["first_commit"] > HANG_DEADLINE

    def test_without_an_injection_the_seconds_count_from_the_detection(self):
        f = only(simulate(fail_at(1, 7.0, injected=False)))
        assert (f.type, f.failure, f.injected) == ("crash", None, None)
        assert f.start == pytest.approx(T0 + 7.0 + DETECTION)
        assert f.seconds["detected"] == 0
        assert f.seconds["respawned"] == pytest.approx(RESPAWN + START, abs=1e-5)

    def test_the_traceback_may_come_from_the_trainer_itself(self):
        events = simulate(fail_at(1, 7.0))
        assert only(events).traceback is None
        error = ev("error", 6.99, 1, rank=0, error="RuntimeError: x", traceback=TRACEBACK)
        assert only([*events, error]).traceback == TRACEBACK

    def test_a_replica_that_fails_while_it_recovers_has_two_honest_entries(self):
        first, second = failures(simulate(fail_at(1, 7.0), fail_at(1, 7.9, escalate=True)))
        assert (first.outcome, second.outcome) == ("failed again", "recovered")
        assert first.times["respawned"] is not None
        assert [first.times[s] for s in STAGES[2:]] == [None] * 3
        assert None not in second.times.values()
        assert second.times["first_commit"] > second.times["respawned"] > first.times["respawned"]
        assert second.escalated == ["2 mesh restarts in 30 s"]
        assert first.escalated == []
        assert second.respawn_level == "hosts"

    def test_a_replica_that_dies_before_it_starts_again(self):
        """The next generation was announced but never ran; its own failure must not borrow the one after."""
        events = [
            *started(0, 1),
            ev("injected", 5, 1, failure=1, type="kill", rank=0),
            ev("detected", 5.1, 1, failure=1, exit="Killed(sig=9)"),
            ev("detected", 5.5, 1, 1, failure=None, exit="SpawnFailed"),
            ev("trainer_started", 7, 1, 2, rank=0, host="n1"),
        ]
        first, second = failures(events)
        assert first.times["respawned"] is None
        assert first.outcome == "failed again"
        assert second.times["respawned"] == T0 + 7

    def test_a_replica_lost_for_good(self):
        f = only(simulate(fail_at(3, 7.0, final=True)))
        assert f.outcome == "lost"
        assert f.times["detected"] is not None
        assert [f.times[s] for s in STAGES[1:]] == [None] * 4

    def test_a_run_that_ends_during_a_recovery(self):
        events = [e for e in simulate(fail_at(2, 7.0)) if e["t"] < T0 + 7.7]
        f = only(events)
        assert f.outcome == "unrecovered"
        assert f.times["respawned"] is not None
        assert f.times["joined"] is None

    def test_a_lost_host_names_its_failures(self):
        f = only(simulate(fail_at(2, 7.0, injected=False, host=True)))
        assert (f.type, f.host, f.respawn_level) == ("host", "node03", "hosts")

    def test_a_lost_host_counts_even_if_nobody_told_of_its_replicas(self):
        events = [e for e in simulate(fail_at(2, 7.0, injected=False, host=True)) if e["kind"] != "detected"]
        f = only(events)
        assert (f.type, f.replica, f.cause, f.outcome) == ("host", 2, "no heartbeat for 3 s", "recovered")

    def test_a_lost_host_is_known_by_the_exit_of_its_procs(self):
        events = [e for e in simulate(fail_at(2, 7.0, injected=False)) if e["kind"] != "host_lost"]
        assert only([{**e, "exit": "Lost(host)"} if e["kind"] == "detected" else e for e in events]).type == "host"

    def test_a_lost_spare_is_no_failure_of_a_replica(self):
        assert failures([*simulate(), ev("host_lost", 7, host="node09", cause="x")]) == []

    def test_the_other_ranks_of_a_dead_replica_are_the_same_failure(self):
        events = simulate(fail_at(2, 7.0), ranks=2)
        echo = ev("detected", 7.05, 2, failure=None, cause="peer died", rank=1, exit="Exited(code=1)")
        f = only([*events, echo])
        assert (f.rank, f.exit) == (0, "Killed(sig=9)")

    def test_an_injection_that_never_took_effect_stays_open(self):
        f = only([*simulate(), ev("injected", 7, 2, failure=1, type="kill", rank=0)])
        assert f.times == dict.fromkeys(STAGES)
        assert f.outcome == "unrecovered"

    def test_order_of_arrival_does_not_matter(self):
        events = eventful()
        shuffled = random.Random(1).sample(events, len(events))
        assert [f.to_dict() for f in failures(shuffled)] == [f.to_dict() for f in failures(events)]


class TestStall:
    def test_the_survivors_wait_and_what_of_it_the_dead_one_cost(self):
        events = [
            *started(0, 1, 2),
            *first_quorum(0, 1, 2),
            ev("injected", 11, 2, failure=1, type="kill", rank=0),
            *asked_and_formed(0, 10, 14),
            *asked_and_formed(1, 12, 14),
        ]
        f = only(events)
        assert f.stall == {0: 4, 1: 2}
        assert f.stall_longest == 4
        assert f.stall_attributable == pytest.approx(2)

    def test_waiting_for_a_living_one_is_not_the_dead_ones_fault(self):
        events = [
            *started(0, 1, 2),
            *first_quorum(0, 1, 2),
            ev("injected", 11, 2, failure=1, type="kill", rank=0),
            *asked_and_formed(0, 9, 14),
            *asked_and_formed(1, 10, 14),
        ]
        assert only(events).stall_attributable == pytest.approx(3)

    def test_the_victims_last_quorum_is_not_a_stall(self):
        """It formed for all at once, but the survivors' events carry a time after the death."""
        events = [
            *started(0, 1, 2),
            *first_quorum(2, formed=1.0),
            ev("injected", 1.001, 2, failure=1, type="kill", rank=0),
            *first_quorum(0, 1, formed=1.002),
            *asked_and_formed(0, 2.0, 2.5, step=0),  # the sync was lost: the same step again
            *asked_and_formed(1, 2.1, 2.5, step=0),
        ]
        assert only(events).stall == pytest.approx({0: 0.5, 1: 0.4})

    def test_a_silent_death_is_dated_by_the_last_sign_of_life(self):
        events = [
            *started(0, 1, 2),
            *first_quorum(0, 1, 2),
            ev("step", 5, 2, rank=0, step=3),
            *asked_and_formed(0, 6, 8),
            *asked_and_formed(1, 7, 8),
            ev("detected", 9, 2, failure=None, cause="no step for 4 s"),
            *asked_and_formed(0, 10, 10.1, step=2),
        ]
        f = only(events)
        assert f.stall == {0: 2, 1: 1}
        assert f.stall_attributable == pytest.approx(1)
        assert f.seconds["detected"] == 0

    def test_those_who_are_down_or_not_in_yet_are_no_survivors(self):
        events = [
            *started(0, 1, 2, 3),
            *first_quorum(0, 1, 2),  # 3 has never been in a quorum
            ev("injected", 4, 1, failure=1, type="kill", rank=0),
            ev("injected", 5, 2, failure=2, type="kill", rank=0),
            *asked_and_formed(0, 6, 7),
            *asked_and_formed(3, 1, 7),
        ]
        first, second = failures(events)
        assert first.stall == second.stall == {0: 1}

    def test_before_the_first_quorum_everybody_is_waiting(self):
        events = [
            *started(0, 1, 2),
            ev("injected", 1, 2, failure=1, type="kill", rank=0),
            *asked_and_formed(0, 2, 4),
            *asked_and_formed(1, 3, 4),
        ]
        assert only(events).stall == {0: 2, 1: 1}

    def test_the_slowest_rank_speaks_for_its_replica(self):
        events = [
            *started(0, 1),
            *first_quorum(0, 1),
            ev("injected", 1.5, 1, failure=1, type="kill", rank=0),
            *asked_and_formed(0, 3, 4, rank=0),
            *asked_and_formed(0, 2, 4, rank=1),
        ]
        assert only(events).stall == {0: 2}

    def test_a_hang_holds_the_survivors_up_until_it_is_killed(self):
        f = only(simulate(fail_at(0, 7.0, "hang")))
        assert set(f.stall) == {1, 2, 3}
        formed = 7.0 + HANG_DEADLINE + HEARTBEAT + TICK
        last_asked = max(asked for asked in (formed - s for s in f.stall.values()))
        assert f.stall_attributable == pytest.approx(formed - last_asked, abs=1e-4)
        assert f.stall_longest > 8

    def test_nobody_is_left(self):
        events = simulate(fail_at(0, 7.0, final=True), fail_at(1, 7.1, final=True), replicas=2)
        assert [f.stall_longest for f in failures(events)] == [None, None]


class TestLostSyncs:
    def test_a_death_between_two_syncs_loses_none(self):
        assert only(simulate(fail_at(2, 7.0))).syncs_lost == 0

    def test_a_death_inside_a_sync_loses_that_of_each_survivor(self):
        formed = next(e["t"] - T0 for e in simulate() if e["kind"] == "quorum")
        f = only(simulate(fail_at(2, formed + SYNC / 2)))
        assert f.syncs_lost == 3
        assert f.outcome == "recovered"

    def test_each_lost_sync_is_charged_once(self):
        events = [
            *started(0, 1, 2),
            *first_quorum(0, 1, 2),
            ev("sync", 2, 0, rank=0, step=0, committed=True),
            ev("injected", 3, 1, failure=1, type="kill", rank=0),
            ev("injected", 4, 2, failure=2, type="kill", rank=0),
            ev("sync", 5, 0, rank=0, step=1, committed=False),
            ev("sync", 6, 0, rank=0, step=1, committed=False),  # of the latest failure: there is no newer one
            ev("sync", 7, 0, rank=0, step=1, committed=True),
            ev("sync", 8, 0, rank=0, step=2, committed=False),  # long after: nobody's fault
        ]
        assert [f.syncs_lost for f in failures(events)] == [1, 1]

    def test_the_sum_is_the_number_of_lost_syncs(self):
        events = eventful()
        lost = sum(e["kind"] == "sync" and not e["committed"] for e in events)
        assert sum(f.syncs_lost for f in failures(events)) == lost > 0


class TestState:
    def test_equal_hashes_of_every_rank(self):
        f = only(simulate(fail_at(2, 7.0), ranks=2))
        assert f.state_equal is True
        assert [s["rank"] for s in f.state] == [0, 1]

    def test_a_different_state_is_told(self):
        f = only(simulate(fail_at(2, 7.0), bad_state=frozenset({2})))
        assert f.state_equal is False
        assert f.state[0]["received"] == "0" * 64 != f.state[0]["sent"]

    def test_one_bad_rank_is_enough(self):
        events = simulate(fail_at(2, 7.0), ranks=2)
        for e in events:
            if e["kind"] == "state_received" and e["rank"] == 1:
                e["sha256"] = "f" * 64
        assert only(events).state_equal is False

    def test_without_hashes_nothing_is_claimed(self):
        events = [{**e, "sha256": None} if "sha256" in e else e for e in simulate(fail_at(2, 7.0))]
        assert only(events).state_equal is None

    def test_what_the_replica_itself_sent_before_is_no_donors_state(self):
        events = simulate(fail_at(2, 7.0))
        for e in events:
            if e["kind"] == "state_sent":
                e["replica"] = 2
        assert only(events).state_equal is None

    def test_hashes_of_another_step_are_not_compared(self):
        events = simulate(fail_at(2, 7.0))
        for e in events:
            if e["kind"] == "state_sent":
                e["step"] += 1
        assert only(events).state_equal is None


class TestCurves:
    def test_participants_fall_and_rise(self):
        assert [n for _, n in curves.participants(simulate(fail_at(1, 15.1)))] == [4, 3, 4]

    def test_a_recovery_within_one_round_is_seen_in_the_training_replicas_only(self):
        events = simulate(fail_at(2, 7.0))
        assert [n for _, n in curves.participants(events)] == [4]
        lanes = curves.lanes(events, failures(events))
        assert 3 in [n for t, n in curves.training_replicas(lanes) if T0 + 6 < t < T0 + 8]

    def test_tokens_and_losses(self):
        events = simulate()
        tokens = curves.committed_tokens(events)
        assert tokens[-1][1] == 12 * 4 * 20 * 512
        assert curves.tokens_at(tokens, T0) == 0
        assert curves.tokens_at(tokens, tokens[3][0]) == tokens[3][1]
        evaluated = curves.eval_loss(events)
        assert [x for x, _ in evaluated] == [n for _, n in tokens]
        assert [y for _, y in evaluated] == sorted((y for _, y in evaluated), reverse=True)
        assert len(curves.train_loss(events, bins=5)) == 5
        seconds = tokens[-1][0] - (T0 + 1.5)
        assert curves.tokens_per_second(events) == pytest.approx(tokens[-1][1] / seconds, rel=1e-3)

    def test_losses_that_are_not_numbers_are_left_out(self):
        events = [ev("eval", 1, 0, tokens=5, loss=float("nan")), ev("eval", 2, 0, tokens=9, loss=2.0)]
        assert curves.eval_loss(events) == [(9, 2.0)]

    def test_goodput(self):
        assert curves.goodput(simulate()) == 1
        assert curves.goodput([]) is None
        formed = next(e["t"] - T0 for e in simulate() if e["kind"] == "quorum")
        events = simulate(fail_at(2, formed + SYNC / 2))
        done = sum(e["kind"] == "step" for e in events)
        # All four had done 20 steps for that sync; the one that rejoins gives its first sync without steps.
        assert curves.goodput(events) == pytest.approx((done - 80) / done)

    def test_lanes_have_no_gaps_and_add_up(self):
        events = eventful()
        found = failures(events)
        for replica, lane in curves.lanes(events, found).items():
            assert all(a.end == b.start for a, b in itertools.pairwise(lane))
            down = [s for s in lane if s.state == "down"]
            assert [s.start for s in down] == [f.start for f in found if f.replica == replica]
            training = sum(s.end - s.start for s in lane if s.state == "training")
            waited = lane[0].end - lane[0].start
            assert training + waited + curves.downtime(lane) == pytest.approx(lane[-1].end - lane[0].start)

    def test_the_lane_of_a_lost_replica_ends_lost(self):
        events = simulate(fail_at(3, 7.0, final=True))
        lane = curves.lanes(events, failures(events))[3]
        assert [s.state for s in lane] == ["joining", "training", "down", "lost"]
        assert lane[-1].end == events[-1]["t"]

    def test_restarts(self):
        assert curves.restarts(eventful()) == {0: 1, 1: 3, 2: 2, 3: 2}


def test_a_replica_that_comes_back_with_its_host_is_not_lost():
    def event(kind, t, **fields):
        return {"kind": kind, "t": float(t), "replica": 1, **fields}

    lost = [event("replica_lost", 5), event("respawn", 9), event("replica_lost", 20)]
    index = EventIndex(lost)
    assert (index.lost_at(1, 4.0), index.lost_at(1, 6.0), index.lost_at(1, 10.0), index.lost_at(1)) == (
        None,
        5,
        None,
        20,
    )
    assert [index.is_last_word(e) for e in index.kind("replica_lost")] == [False, True]
    assert index.lost_at(2) is None
