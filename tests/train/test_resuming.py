"""A run that goes on: which options it takes, what its report says of both starts, and what its live view shows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from run_events import two_starts
from support import run_command

from monarch_slurm.errors import ConfigError
from monarch_slurm.train import curves
from monarch_slurm.train.config import TrainConfig
from monarch_slurm.train.event_index import EventIndex
from monarch_slurm.train.live_state import RunState
from monarch_slurm.train.report import SCHEMA, build_report
from monarch_slurm.train.report_html import render
from monarch_slurm.train.resuming import FIXED, check_changes, history, resumed_config
from monarch_slurm.train.run_lock import alone_in
from monarch_slurm.train.saved import SavedState, mark_saved

PER_SYNC = 4 * 20 * 512
BEFORE = TrainConfig(model="tiny", replicas=3, tokens=5000, seed=3, lr=1e-3, data="/text")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run that was saved at step 2, with 1200 of 5000 tokens."""
    events: list[dict[str, Any]] = [{"kind": "run_started", "t": 1.0, "config": BEFORE.to_dict()}]
    events += [
        {"kind": "sync", "t": 1.0 + step, "step": step, "committed": True, "tokens": 600 * step} for step in (1, 2, 3)
    ]
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events) + '{"kind":')
    (tmp_path / "state").mkdir()
    mark_saved(SavedState(str(tmp_path), 2, 0, (), ()))
    return tmp_path


def test_what_is_not_given_is_as_before(folder: Path) -> None:
    assert resumed_config(folder, {}) == BEFORE


OTHER = {"model": "debug", "data": None, "seq_len": 64, "batch_size": 8, "replicas": 4, "procs_per_replica": 2}
OTHER |= {"sync_every": 10, "seed": 0, "engine": "torchtitan"}


@pytest.mark.parametrize("name", sorted({*FIXED} - {"engine_options"}))
def test_what_the_saved_state_depends_on_is_refused_with_both_values(folder: Path, name: str) -> None:
    option = f"--{name.replace('_', '-')}"
    now, before = OTHER[name], getattr(BEFORE, name)
    said = f"cannot continue with {option} {'its default' if now is None else now} (it was {before})"
    with pytest.raises(ConfigError) as raised:
        resumed_config(folder, {name: now})
    assert said in str(raised.value)


def test_of_an_engines_own_options_only_the_number_of_steps_may_change(folder: Path) -> None:
    before = ["--module", "llama3", "--training.steps", "10", "--training.seq_len=8"]
    told = {"kind": "run_started", "t": 2.0, "config": {**BEFORE.to_dict(), "engine_options": before}}
    with (folder / "journal.jsonl").open("w") as file:
        file.write(json.dumps(told) + "\n")
    longer = ("--module", "llama3", "--training.seq_len=8", "--training.steps=20")
    config = resumed_config(folder, {"engine_options": longer})
    assert config.engine_options == longer
    assert check_changes(folder, history(folder), config) == {}
    with pytest.raises(
        ConfigError, match=r"cannot continue with other options after --: --module qwen3 \(they were --m"
    ):
        resumed_config(folder, {"engine_options": ("--module", "qwen3")})


@pytest.mark.parametrize(
    ("name", "value"),
    [("tokens", 9000), ("tokens", 1300), ("lr", 5e-4), ("min_replicas", 3), ("step_deadline", 3.0)],
)
def test_what_may_change_is_taken_and_told(folder: Path, name: str, value: Any) -> None:
    config = resumed_config(folder, {name: value})
    assert config.to_dict() == {**BEFORE.to_dict(), name: value}
    assert check_changes(folder, history(folder), config) == {name: (getattr(BEFORE, name), value)}


def test_no_fewer_tokens_than_are_trained(folder: Path) -> None:
    with pytest.raises(ConfigError, match="with --tokens 1200: its saved state has 1200 already"):
        resumed_config(folder, {"tokens": 1200})


def test_a_run_that_was_saved_at_its_very_end_goes_on_to_finish(folder: Path) -> None:
    mark_saved(SavedState(str(folder), 9, 0, (), ()))
    with (folder / "journal.jsonl").open("w") as file:
        for event in (
            {"kind": "run_started", "t": 1.0, "config": BEFORE.to_dict()},
            {"kind": "sync", "t": 2.0, "step": 9, "committed": True, "tokens": BEFORE.tokens},
        ):
            file.write(json.dumps(event) + "\n")
    assert resumed_config(folder, {"tokens": BEFORE.tokens}) == BEFORE


def test_what_is_no_run_or_has_finished_does_not_go_on(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not the folder of a run: it has no journal\.jsonl"):
        resumed_config(folder / "state", {})
    parts = {"summary": {"ok": True}, "failures": [], "curves": {}, "replicas": [], "events": []}
    (folder / "report.json").write_text(json.dumps({"schema": SCHEMA, **parts}))
    with pytest.raises(ConfigError, match="has trained all its tokens"):
        resumed_config(folder, {})


def test_the_command_line_refuses_and_starts_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.iterdir())
    code, said = run_command(
        monkeypatch, capsys, "train", "--local", "--resume", str(folder), "--seed", "4", "--lr", "1"
    )
    assert (code > 0, "--seed 4 (it was 3)" in said, "--lr" in said) == (True, True, False), said
    assert sorted(folder.iterdir()) == before


def test_a_run_that_goes_on_is_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = folder / "journal.jsonl"
    journal.write_text(journal.read_text().replace("/text", __file__))
    before = journal.read_bytes()
    with alone_in(folder):
        code, said = run_command(monkeypatch, capsys, "train", "--local", "--resume", str(folder))
    assert code == 1, said
    assert f"going on already, in process {os.getpid()}" in said
    assert journal.read_bytes() == before
    assert not list(folder.glob("report.*"))
    journal.unlink()  # as in the first second of a run
    with alone_in(folder):
        code, said = run_command(monkeypatch, capsys, "train", "--local", "--resume", str(folder))
    assert (code, f"going on already, in process {os.getpid()}" in said) == (1, True), said
    code, said = run_command(monkeypatch, capsys, "train", "--local", "--resume", str(folder))
    assert "is not the folder of a run" in said


def test_the_report_has_the_course_that_counts() -> None:
    first, second = two_starts(kept=5)
    report = build_report([*first, *second])
    summary = report["summary"]
    assert report["config"]["tokens"] == summary["tokens"] == 11 * PER_SYNC
    assert [start["changed"] for start in report["starts"]] == [{}, {"tokens": [12 * PER_SYNC, 11 * PER_SYNC]}]
    assert f"Since start 2 tokens is {11 * PER_SYNC}; it was {12 * PER_SYNC}." in render(report)
    ends = [e["loss"] for e in second if e["kind"] == "finished"]
    assert summary["final_loss"] == pytest.approx(sum(ends) / len(ends))
    committed = [tokens for _, tokens in curves.committed_tokens([*first, *second])]
    assert committed == [n * PER_SYNC for n in (*range(1, 9), *range(5, 12))]
    pace = curves.tokens_per_second([*first, *second])
    assert pace is not None
    assert pace > 0.3 * (curves.tokens_per_second(first) or 0.0), "an hour of pause is no time of training"


@pytest.mark.parametrize("kept", [0, 5])
def test_the_last_loss_is_never_that_of_steps_that_are_done_again(kept: int) -> None:
    first, second = two_starts(kept)
    first = [{**e, "loss": 99.0} if e["kind"] == "eval" and e["step"] > kept else e for e in first]
    first.append({**second[-2], "t": first[-1]["t"], "step": 8, "loss": 99.0, "generation": 0, "sha256": "other"})
    stopped = [e for e in second if e["kind"] != "finished" and not (e["kind"] == "sync" and e["step"] > kept + 2)]
    for then in (second, stopped, second[:1]):
        loss = build_report([*first, *then])["summary"]["final_loss"]
        assert loss is None or loss < 99.0
    assert {e["step"] for e in EventIndex([*first, *second]).kept("eval")} == set(range(1, kept + 7))


def test_the_live_view_counts_the_pace_of_this_start_only() -> None:
    first, second = two_starts(kept=5)
    state = RunState()
    for e in first:
        state.apply(e)
    budget = 100 * PER_SYNC
    before = state.tokens_per_second()
    assert before is not None
    state.apply(second[0])
    assert (state.tokens_per_second(), state.eta(budget), state.recoveries) == (None, None, 0)
    for e in second:
        state.apply(e)
        pace, eta = state.tokens_per_second(), state.eta(budget)
        if pace:
            assert pace < 1.5 * before
            assert eta == pytest.approx((budget - state.tokens) / pace)
    assert state.tokens == 11 * PER_SYNC
    assert (state.failures, state.recoveries) == (0, 0)
