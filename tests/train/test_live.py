"""The live view: lines in a log, a panel in a terminal, and never an exception."""

from __future__ import annotations

import io
import random
import re
import signal
import sys
import threading

import pytest
from rich.console import Console
from run_events import T0, eventful, fail_at, simulate

from monarch_slurm.train.config import TrainConfig
from monarch_slurm.train.live import LiveView
from monarch_slurm.train.live_state import RunState

CONFIG = TrainConfig(tokens=12 * 4 * 20 * 512)


def lines_of(events, config=CONFIG, interval=5.0):
    """Return the lines of a log, each without its clock time, of a run whose clock is that of the events."""
    now = [0.0]
    out = io.StringIO()
    view = LiveView(config, Console(file=out, width=80), interval=interval, clock=lambda: now[0])
    with view:
        for e in events:
            now[0] = e["t"]
            view.update(e)
    lines = out.getvalue().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d  \S", line) for line in lines)
    return [line[10:] for line in lines]


def panel_of(events, config=CONFIG, width=120, height=40):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)
    view = LiveView(config, console)
    for e in events:
        view.update(e)
    with console.capture() as captured:
        console.print(view.render())
    return captured.get()


class Pressing(io.StringIO):
    """A terminal at which Ctrl-C is pressed when something is written to it next."""

    armed = False

    def write(self, text):
        if self.armed and threading.current_thread() is threading.main_thread():
            self.armed = False
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def state_after(events, until=None):
    state = RunState()
    for e in events:
        if until is not None and e["t"] > T0 + until:
            break
        state.apply(e)
    return state


class TestLines:
    def test_a_quiet_run(self):
        lines = lines_of(simulate())
        assert lines[0] == "run debug-0001 started on 5 hosts"
        assert lines[-2] == "run finished: token budget reached"
        progress = [line for line in lines if line.startswith("step ")]
        assert len(lines) == len(progress) + 2
        assert re.fullmatch(
            r"step 240  492k/492k tokens \(100 %\)  \S+k tokens/s  loss \d\.\d+  val \d\.\d+  4 of 4 replicas",
            progress[-1],
        )
        assert re.search(r"ETA \d+:\d\d$", progress[2])

    def test_progress_comes_no_more_often_than_the_interval(self):
        events = simulate()
        length = events[-1]["t"] - events[0]["t"]
        for interval in (2.0, 10.0):
            progress = [line for line in lines_of(events, interval=interval) if line.startswith("step ")]
            assert length / interval / 2 < len(progress) <= length / interval + 2

    def test_failure_and_recovery_have_a_line_each(self):
        lines = lines_of(simulate(fail_at(2, 7.0)))
        told = [line for line in lines if not line.startswith(("step ", "run "))]
        assert told == [
            "injected kill into replica 2 rank 0",
            "replica 2 down on node03: Killed(sig=9) (the process died), seen 0.03 s after the injection",
            "replica 2 recovered on node03 after 1.49 s, generation 1",
        ]

    def test_escalation_loss_and_hosts(self):
        told = lines_of(eventful())
        assert "replica 1 escalated to hosts: 2 mesh restarts in 30 s" in told
        assert "host node03 lost: no heartbeat for 3 s" in told
        assert "replica 2 recovered on node09 after 2.54 s, generation 2" in told
        told = lines_of(simulate(fail_at(1, 7.0, final=True), ok=False))
        assert "replica 1 lost for good: 3 failures in 60 s" in told
        assert "run ended early: too few replicas for a quorum" in told

    def test_saves_and_those_that_fail(self):
        of_rank = {"replica": 0, "rank": 0, "generation": 0, "step": 4}
        events = [
            {"kind": "saved", "t": T0, **of_rank, "sha256": "0", "bytes": 1, "seconds": 0.1},
            {"kind": "state_saved", "t": T0 + 1, "step": 4},
            {"kind": "saved", "t": T0 + 2, **of_rank, "step": 6, "error": "cannot save the state in /x: No space"},
        ]
        said = ["saved at sync 4", "replica 0 could not save: cannot save the state in /x: No space"]
        assert [line for line in lines_of(events) if "save" in line] == said

    def test_other_ranks_of_a_dead_replica_are_not_told(self):
        events = simulate(fail_at(2, 7.0), ranks=2)
        echo = {"kind": "detected", "t": T0 + 7.05, "replica": 2, "generation": 0, "rank": 1, "exit": "Exited(code=1)"}
        lines = lines_of(sorted([*events, echo], key=lambda e: e["t"]))
        assert len([line for line in lines if " down" in line]) == 1

    def test_text_of_events_cannot_steer_the_terminal(self):
        events = simulate(fail_at(2, 7.0))
        for e in events:
            if e["kind"] == "detected":
                e["cause"] = "\x1b[2J[red]bad[/red]\r\n:bomb:\x07" + "x" * 5000
        line = next(line for line in lines_of(events) if line.startswith("replica 2 down"))
        assert "[2J[red]bad[/red] :bomb:x" in line
        assert "\x1b" not in line
        assert len(line) < 300


class TestPanel:
    def test_what_it_shows(self):
        events = [e for e in eventful() if e["t"] <= T0 + 55.7]
        panel = panel_of(events, TrainConfig(tokens=1_474_560))
        assert "debug: training" in panel
        assert "707k / 1.47M tokens  48 %  ETA 0:5" in panel
        assert re.search(r"\b2 +● joining +2 +\d+ +node09 +HostLost", panel)
        assert re.search(r"\b0 +● training +1 +\d+ +node01 +hang, Killed\(sig=9\)", panel)
        assert "3/4" in panel
        assert "5, 4 recovered" in panel
        assert "host node03 lost" in panel

    def test_before_anything_happened(self):
        panel = panel_of([])
        assert panel.count("● starting") == 4
        assert "0 / 492k tokens  0 %" in panel

    def test_at_the_end(self):
        panel = panel_of(simulate())
        assert "debug: finished" in panel
        assert panel.count("● finished") == 4
        assert "ETA" not in panel

    def test_a_low_terminal_shows_who_is_in_trouble(self):
        config = TrainConfig(replicas=40)
        events = [e for e in simulate(fail_at(33, 4.5), replicas=40, skew=0.0001, syncs=4) if e["t"] < T0 + 4.6]
        panel = panel_of(events, config, height=24)
        assert re.search(r"\b33 +● restarting", panel)
        assert "and 30 more" in panel
        assert len(panel.splitlines()) <= 24

    def test_as_a_context_manager_it_leaves_the_last_panel(self):
        out = io.StringIO()
        with LiveView(CONFIG, Console(file=out, force_terminal=True, width=100, height=40)) as view:
            for e in simulate(fail_at(2, 7.0)):
                view.update(e)
        assert "replica 2 recovered" in out.getvalue().split("debug: ")[-1]
        assert "debug: finished" in out.getvalue()

    @pytest.mark.parametrize("when", ["start", "stop"])
    def test_ctrl_c_while_it_starts_or_stops_leaves_the_terminal_as_it_was(self, when):
        out = Pressing()
        view = LiveView(CONFIG, Console(file=out, force_terminal=True, width=80, height=30))
        before = sys.stdout, sys.stderr
        out.armed = when == "start"

        def run():
            with view:
                out.armed = True

        with pytest.raises(KeyboardInterrupt):
            run()
        assert not out.armed
        assert (sys.stdout, sys.stderr) == before
        assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l") >= 0

    def test_a_terminal_of_sixty_columns_has_all_figures(self):
        text = panel_of(eventful(), width=60)
        for name in ("step", "tokens/s", "train loss", "val loss", "participants", "quorum", "failures"):
            assert name in text
        assert "…" not in text.partition("replica")[0]

    def test_a_narrow_terminal(self):
        assert "tokens" in panel_of(eventful(), width=40, height=10)


class TestState:
    @pytest.mark.parametrize(
        ("until", "state"),
        [
            (1.2, "starting"),
            (2.0, "training"),
            (7.035, "down"),
            (7.1, "restarting"),
            (8.0, "joining"),
            (8.35, "joining"),  # in the quorum, but without the state
            (8.6, "training"),
        ],
    )
    def test_states_of_a_replica_that_dies_and_comes_back(self, until, state):
        assert state_after(simulate(fail_at(2, 7.0)), until).replicas[2].state == state

    def test_waiting_for_a_quorum_is_syncing(self):
        assert state_after(simulate(), 3.6).replicas[0].state == "syncing"

    def test_the_last_words_of_a_dead_generation_change_nothing(self):
        events = simulate(fail_at(2, 7.0))
        state = state_after(events, 7.1)
        before = vars(state.replicas[2]).copy()
        late = {"kind": "step", "t": T0 + 7.2, "replica": 2, "generation": 0, "rank": 0, "step": 9999, "loss": 99.0}
        assert state.apply(late) == []
        assert vars(state.replicas[2]) == before
        assert state.step < 9999

    def test_counts(self):
        state = state_after(eventful())
        assert (state.failures, state.recoveries, state.syncs_lost) == (8, 7, 3)
        assert state.ok is True
        formed = next(e["t"] - T0 for e in simulate() if e["kind"] == "quorum")
        assert state_after(simulate(fail_at(2, formed + 0.1))).syncs_lost == 3

    def test_the_rate_is_that_of_the_last_minute(self):
        state = RunState()
        for i in range(400):
            speed = 100 if i < 200 else 300
            tokens = speed * i if i < 200 else 100 * 199 + 300 * (i - 199)
            state.apply(
                {"kind": "sync", "t": float(i), "replica": 0, "generation": 0, "committed": True, "tokens": tokens}
            )
        assert state.tokens_per_second() == pytest.approx(300)
        assert state.eta(state.tokens + 600) == pytest.approx(2)


class TestOddities:
    ODD = (None, -1, "x", [], {}, float("nan"), float("inf"), 10**400, True, "\udcff\x1b[0m", b"\x00", object())

    @pytest.mark.parametrize("terminal", [False, True])
    def test_nothing_that_arrives_raises(self, terminal):
        rng = random.Random(3)
        console = Console(file=io.StringIO(), force_terminal=terminal, width=100, height=30)
        with LiveView(CONFIG, console) as view:
            for e in (None, 3, "x", [], {}, {"kind": "unknown", "t": 1}, {"kind": "step"}, {"kind": [], "t": 0}):
                view.update(e)
            for e in eventful() * 2:
                name = rng.choice([*e, "failure", "replica"])
                view.update({**e, name: rng.choice(self.ODD)} if rng.random() < 0.7 else e)
            view.render()
        assert "training" in repr(view) or "step" in repr(view)

    @pytest.mark.parametrize("terminal", [False, True])
    def test_a_closed_output_is_no_reason_to_stop(self, terminal):
        out = io.StringIO()
        view = LiveView(CONFIG, Console(file=out, force_terminal=terminal, width=80, height=30))
        out.close()
        with view:
            for e in simulate():
                view.update(e)
        assert view.state.ok is True
