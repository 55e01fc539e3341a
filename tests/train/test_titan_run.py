"""Real torchtitan on CPUs, by ``make test-torchtitan``: what it is asked for, and whole runs with real kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_run import left_behind, report_in, saved_steps

from monarch_slurm.errors import ConfigError
from monarch_slurm.train.config import TrainConfig

if os.environ.get("MONARCH_SLURM_TEST_TORCHTITAN") != "1":
    pytest.skip("needs torchtitan; run: make test-torchtitan", allow_module_level=True)

from monarch_slurm.train import titan

pytestmark = [pytest.mark.slow, pytest.mark.train, pytest.mark.usefixtures("titan_environment")]

TINY = ["--module", "titan_on_cpu", "--config", "tiny"]
DEADLINE = 240.0


def start(out: Path, *options: str, engine: list[str]) -> subprocess.Popen[str]:
    # Deadlines that a loaded machine keeps: only what is killed here is to fail.
    patient = ["--step-deadline", "120", "--sync-deadline", "240", "--sync-every", "5"]
    command = [sys.executable, "-m", "monarch_slurm", "train", "--local", "--engine", "torchtitan", *patient]
    command += ["--out", str(out), *options, "--", *TINY, *engine]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(out: Path, process: subprocess.Popen[str], kind: str, **fields: Any) -> dict[str, Any]:
    """Return the first event of a kind with such fields in the journal of the run, as soon as it is there."""
    deadline = time.monotonic() + DEADLINE
    while True:
        for journal in out.glob("*/journal.jsonl"):
            for line in journal.read_text().splitlines():
                event = json.loads(line) if line.endswith("}") else {}
                if event.get("kind") == kind and fields.items() <= event.items():
                    return event
        assert time.monotonic() < deadline, f"no {kind} {fields}"
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def test_a_killed_replica_comes_back_and_all_steps_are_committed(tmp_path: Path) -> None:
    # A quorum is all three here: the others wait for the one that is killed, however long it takes to come back.
    process = start(tmp_path, "--replicas", "3", "--min-replicas", "3", engine=["--training.steps", "40"])
    victim = wait_for(tmp_path, process, "trainer_started", replica=1)
    wait_for(tmp_path, process, "sync", step=3, committed=True)
    os.kill(victim["pid"], signal.SIGKILL)
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, output
    report = report_in(tmp_path)
    summary = report["summary"]
    assert (summary["ok"], summary["final_states_equal"], summary["replicas_lost"]) == (True, True, 0)
    (failure,) = report["failures"]
    assert (failure["exit"], failure["outcome"], failure["state_equal"]) == ("Killed(sig=9)", "recovered", True)
    config = report["config"]
    assert (config["model"], config["engine"], config["seq_len"], config["batch_size"]) == (
        "llama3 debugmodel", "torchtitan", 64, 2
    )  # fmt: skip
    assert config["tokens"] == 3 * 40 * 64 * 2
    assert report["versions"]["torchtitan"].startswith("0.3.")
    # The replica that came back brought nothing to one sync, so there was one more, and two replicas' work too much.
    syncs = [e for e in report["events"] if e["kind"] == "sync" and e["replica"] == 0]
    assert [e["step"] for e in syncs if e["committed"]] == list(range(1, 10))
    assert summary["tokens"] == config["tokens"] + 2 * 5 * 64 * 2
    assert not left_behind(tmp_path)


def test_sharded_replicas_save_when_asked_and_go_on_for_longer(tmp_path: Path) -> None:
    shape = ["--replicas", "2", "--procs-per-replica", "2"]
    # torchtitan's own choice of a backend shards over more than one rank only with torch 2.14.
    told = ["--validator.enable", "--parallelism.spmd_backend", "partial_dtensor", "--training.steps"]
    process = start(tmp_path, *shape, engine=[*told, "10000"])
    wait_for(tmp_path, process, "sync", step=2, committed=True)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 75, output
    (folder,) = tmp_path.iterdir()
    step = saved_steps(folder)[0]

    steps = str(5 * (step + 3))
    process = start(tmp_path, *shape, "--resume", str(folder), engine=[*told, steps])
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, output
    assert f"going on with run {folder.name} from sync {step}" in output
    report = report_in(tmp_path)
    summary = report["summary"]
    assert (summary["ok"], summary["failures"], summary["final_states_equal"]) == (True, 0, True)
    assert summary["tokens"] == report["config"]["tokens"] == 2 * int(steps) * 2 * 2 * 64
    assert [s["step"] for s in report["starts"]] == [0, step]
    assert 0 < summary["final_loss"] < 9
    positions = sorted(path.name for path in (folder / "positions" / "replica-1" / "rank-1").iterdir())
    assert positions == sorted(f"step-{step + i}.json" for i in (2, 3))
    assert not left_behind(tmp_path)


def test_a_run_begins_with_a_model_and_writes_the_one_that_it_has_trained(tmp_path: Path) -> None:
    export = ["--checkpoint.enable", "--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf"]
    export += ["--training.steps", "10"]
    finals = []
    initial: list[str] = []
    for out in (tmp_path / "first", tmp_path / "second"):
        process = start(out, "--replicas", "2", engine=[*export, *initial])
        output, _ = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, output
        (model,) = out.glob("*/titan/replica-*/checkpoint/step-10")  # of one replica, since all have the same
        assert list(model.glob("*.safetensors"))
        report = report_in(out)
        assert report["summary"]["final_states_equal"] is True
        (begun,) = (e["loss"] for e in report["events"] if e["kind"] == "step" and (e["step"], e["replica"]) == (1, 0))
        finals.append(begun)
        initial = ["--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path", str(model)]
    assert finals[1] < finals[0] - 0.1  # the second has learnt what the first did


def test_what_torchtitan_raises_in_a_rank_is_reported_and_not_tried_again(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    process = start(tmp_path / "runs", "--replicas", "2", engine=["--dataloader.dataset_path", nowhere])
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1, output
    assert "Traceback" not in output
    assert "torchtitan cannot build its trainer: FileNotFoundError: " in output
    report = report_in(tmp_path / "runs")
    assert report["summary"]["replica_restarts"] == 0
    assert "torchtitan/hf_datasets/text_datasets.py" in report["failures"][0]["traceback"]


REFUSED = [
    ([], "--module is required"),
    (["--module", "llama3"], "--config is required"),
    (["--module", "llama3", "--config", "none"], "Config function 'none' not found"),
    (["--module", "no.such.module", "--config", "tiny"], "Cannot import module 'no.such.module'"),
    ([*TINY, "--training.stepz", "3"], r"Unrecognized options: --training.stepz, 3. Perhaps you meant: --training."),
    ([*TINY, "--training.steps", "x"], "Error parsing --training.steps"),
    ([*TINY, "--training.steps", "0"], "--training.steps 0: at least one"),
    ([*TINY, "--training.global_batch_size", "3"], "--training.global_batch_size 3 is that of one replica"),
    ([*TINY, "--parallelism.tensor_parallel_degree", "2"], "--parallelism.tensor_parallel_degree 2"),
    ([*TINY, "--parallelism.data_parallel_replicate_degree", "2"], "is not --procs-per-replica 1"),
    ([*TINY, "--hf_assets_path", "/no/such/folder"], "--hf_assets_path /no/such/folder is not a folder"),
    ([*TINY, "--checkpoint.create_seed_checkpoint"], "--checkpoint.create_seed_checkpoint does not train"),
    ([*TINY, "--checkpoint.enable", "--checkpoint.no-initial_load_model_only"], "use --resume of monarch-slurm train"),
    ([*TINY, "--comm.mode", "fake_backend"], "--comm.mode fake_backend"),
    (["--module", "torchft.llama3", "--config", "llama3_torchft_debugmodel"], "such as --module llama3"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=lambda value: " ".join(value)[-40:])
def test_what_cannot_be_had_is_refused_before_anything_is_started(options: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        titan.described(TrainConfig(engine="torchtitan", engine_options=tuple(options)))
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_budget_follows_from_the_steps() -> None:
    options = (*TINY, "--training.steps", "30", "--training.global_batch_size", "8", "--training.seq_len", "32")
    config = titan.described(TrainConfig(engine="torchtitan", engine_options=options, replicas=3, procs_per_replica=2))
    assert (config.seq_len, config.batch_size, config.tokens) == (32, 4, 30 * 8 * 32 * 3)
    assert config.tokens_per_sync * config.replicas == 20 * 8 * 32 * 3
