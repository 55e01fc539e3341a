"""The main job on a real cluster: it trains through the loss of nodes, and the cluster can use them again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from slurm_nodes import Cluster, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.train]

SMALL = ["--model", "tiny", "--seq-len", "32", "--batch-size", "2", "--no-exclusive", "--cpus-per-task", "1"]
"""Steps cost little, so that a run may have many of them: what happens to it has to happen before they are over."""


PATIENT = ["--step-deadline", "60", "--sync-deadline", "120"]
"""Deadlines that a loaded machine keeps: nothing is to fail but what a test breaks."""


@contextmanager
def training(out: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run ``monarch-slurm train``, which writes to ``log`` beside ``out``."""
    command = [sys.executable, "-m", "monarch_slurm", "train", *SMALL, "--out", str(out), *options]
    with (
        open(out.with_name("log"), "w") as log,
        subprocess.Popen(command, stdout=log, stderr=log, text=True) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def wait_for_replicas(out: Path, process: subprocess.Popen[str], count: int) -> None:
    wait_until(
        lambda: len(committed_by(out)) == count or process.poll() is not None, f"{count} replicas that train", 300
    )
    assert process.poll() is None, out.with_name("log").read_text()


def events(out: Path) -> list[dict[str, Any]]:
    """What the journal of the run in ``out`` says so far."""
    found = []
    for journal in out.glob("*/journal.jsonl"):
        found += [json.loads(line) for line in journal.read_text().split("\n")[:-1]]
    return found


def committed_by(out: Path, after: float = 0.0) -> dict[int, int]:
    """Number of committed syncs of each replica since ``after``."""
    counts: dict[int, int] = {}
    for item in events(out):
        if item["kind"] == "sync" and item["committed"] and item["t"] > after:
            counts[item["replica"]] = counts.get(item["replica"], 0) + 1
    return counts


def lost_hosts(out: Path) -> set[str]:
    return {item["host"] for item in events(out) if item["kind"] == "host_lost"}


def test_nodes_are_lost_and_the_others_train_on(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    with training(out, "--nodes", "4", "--replicas", "4", "--tokens", "160000", "--reference", "none") as process:
        wait_for_replicas(out, process, 4)
        cluster.kill("n3")
        wait_until(lambda: "n3" in lost_hosts(out), "the loss of n3 to be noticed")
        cluster.cut("n4")
        wait_until(lambda: "n4" in lost_hosts(out), "the loss of n4 to be noticed")
        lost = max(item["t"] for item in events(out) if item["kind"] == "host_lost")
        wait_until(lambda: {0, 1} <= committed_by(out, lost).keys(), "the other two to commit without them")
        assert process.wait(timeout=600) == 0, (tmp_path / "log").read_text()
    cluster.heal("n3", "n4")  # not before: their replicas would come back
    (report_path,) = out.glob("*/report.json")
    report = json.loads(report_path.read_text())
    assert report["summary"]["ok"] is True
    assert report["summary"]["job_restarts"] == 0
    by_host = {failure["host"]: failure for failure in report["failures"]}
    assert set(by_host) == {"n3", "n4"}, report["failures"]
    for failure in by_host.values():
        assert failure["type"] == "host"
        assert "nothing was heard" in failure["cause"]
    assert report["summary"]["replicas_lost"] == 2
    assert sorted(report["hosts"]) == ["n1", "n2", "n3", "n4"]
    participants = [count for _, count in report["curves"]["participants"]]
    assert max(participants) == 4
    assert participants[-1] == 2
    # What was lost is as good as new: Slurm can give it to somebody else.
    for node in ("n3", "n4"):
        assert cluster.run("srun", "-w", node, "hostname").strip() == node


def test_replicas_come_back_with_their_hosts_without_a_spare(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "runs"

    def commits_again(replica: int, host: str) -> None:
        wait_until(lambda: host in lost_hosts(out), f"the loss of {host} to be noticed")
        lost = max(item["t"] for item in events(out) if item["kind"] == "host_lost" and item["host"] == host)
        if host in cluster.hurt:
            cluster.heal(host)
        wait_until(
            lambda: replica in committed_by(out, lost) or process.poll() is not None,
            f"replica {replica} to commit again on {host}",
            240,
        )
        assert process.poll() is None, out.with_name("log").read_text()

    options = ["--nodes", "3", "--replicas", "3", "--tokens", "100000000", "--reference", "none", *PATIENT]
    with training(out, *options) as process:
        wait_for_replicas(out, process, 3)
        cluster.call("exec", "n3", "pkill", "-9", "-f", "monarch_slurm.host --folder")
        commits_again(2, "n3")
        cluster.cut("n2")
        commits_again(1, "n2")
        process.send_signal(signal.SIGINT)  # cancels the job
        assert process.wait(60) == 130
    wait_until(lambda: events(out)[-1]["kind"] == "run_finished", "the end of the run")
    log = out.with_name("log").read_text()
    assert "replica 2 lost until its host is back or replaced" in log
    assert "replica 2 starts again" in log
    (folder,) = (journal.parent for journal in out.glob("*/journal.jsonl"))
    wait_until(lambda: (folder / "report.json").exists(), "the report")
    report = json.loads((folder / "report.json").read_text())
    assert report["summary"]["replicas_lost"] == 0
    assert [(f["host"], f["outcome"]) for f in report["failures"]] == [("n3", "recovered"), ("n2", "recovered")]


def test_a_run_saves_when_it_is_given_notice_and_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    with training(out, "--nodes", "2", "--replicas", "2", "--tokens", "100000000", "--requeue") as process:
        wait_for_replicas(out, process, 2)
        job = cluster.run("squeue", "-h", "-o", "%i").strip()
        cluster.run("scancel", "--batch", "--signal=USR2", job)  # as --signal does near the time limit
        wait_until(lambda: loaded_and_committed(out) or process.poll() is not None, "the second start to commit")
        assert process.poll() is None, (tmp_path / "log").read_text()
        process.send_signal(signal.SIGINT)  # cancels the job
        assert process.wait(60) == 130
    wait_until(lambda: events(out)[-1]["kind"] == "run_finished", "the end of the run")
    (folder,) = (journal.parent for journal in out.glob("*/journal.jsonl"))
    wait_until(lambda: len(json.loads((folder / "report.json").read_text())["starts"]) == 2, "the second report")
    report = json.loads((folder / "report.json").read_text())
    first, second = report["starts"]
    assert first["reason"] == f"asked to end (the time limit); saved at sync {first['saved_step']}"
    assert second["step"] == first["saved_step"] > 0
    assert first["job"] == second["job"] == job
    assert (report["run"], report["summary"]["job_restarts"]) == (folder.name, 1)
    assert report["summary"]["failures"] == report["summary"]["replica_restarts"] == 0
    again = [e for e in report["events"] if e["kind"] == "sync" and e["t"] > second["started"]]
    assert min(e["step"] for e in again if e["committed"]) == first["saved_step"] + 1


def test_a_controller_that_is_killed_is_started_again_or_says_how_to_continue(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    options = ["--nodes", "2", "--replicas", "2", "--tokens", "100000000", "--sync-every", "5", "--save-every", "1"]
    with training(out, *options, *PATIENT, "--requeue") as process:
        wait_for_replicas(out, process, 2)
        wait_until(lambda: any(item["kind"] == "state_saved" for item in events(out)), "a saved state", 240)
        cluster.call("exec", "n1", "pkill", "-9", "-f", "monarch_slurm train --in-job")
        wait_until(lambda: loaded_and_committed(out) or process.poll() is not None, "the second start to commit", 300)
        assert process.poll() is None, (tmp_path / "log").read_text()
        job = cluster.run("squeue", "-h", "-o", "%i").strip()
        assert " Restarts=1 " in cluster.run("scontrol", "show", "job", "-o", job)
        cluster.run("scontrol", "update", f"jobid={job}", "requeue=0")
        said = (out / job / "batch.log").read_text()
        assert "the program was killed by SIGKILL; Slurm starts the job again" in said
        cluster.call("exec", "n1", "pkill", "-9", "-f", "monarch_slurm train --in-job")
        assert process.wait(240) == 137, (tmp_path / "log").read_text()
    (run,) = (journal.parent.resolve() for journal in out.glob("*/journal.jsonl"))
    hint = f"to continue: the same command with --resume {run}"
    assert hint in (tmp_path / "log").read_text()
    said = cluster.run(sys.executable, "-m", "monarch_slurm", "status", job)
    assert "exit code 137: killed by SIGKILL" in said
    assert hint in said


def loaded_and_committed(out: Path) -> bool:
    kinds = [item["kind"] for item in events(out) if item["kind"] != "sync" or item["committed"]]
    return "loaded" in kinds and "sync" in kinds[kinds.index("loaded") :]


def test_a_replica_goes_on_at_a_spare_node(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    options = ["--nodes", "3", "--spares", "1", "--replicas", "3", "--tokens", "160000", "--reference", "none"]
    with training(out, *options) as process:
        wait_for_replicas(out, process, 3)
        cluster.kill("n3")
        wait_until(lambda: "n3" in lost_hosts(out), "the loss of n3 to be noticed")
        assert process.wait(timeout=600) == 0, (tmp_path / "log").read_text()
    (lost,) = [item for item in events(out) if item["kind"] == "host_lost"]
    assert (lost["host"], lost["replaced_by"]) == ("n3", "n4")
    assert {0, 1, 2} <= committed_by(out, lost["t"]).keys()
    (report_path,) = out.glob("*/report.json")
    report = json.loads(report_path.read_text())
    assert report["summary"]["ok"] is True
    assert (report["summary"]["replicas_lost"], report["summary"]["job_restarts"]) == (0, 0)
    (failure,) = report["failures"]
    assert (failure["type"], failure["host"], failure["outcome"]) == ("host", "n3", "recovered")
    assert "n4 takes its place" in failure["cause"]


APPTAINER = """#!/bin/bash
# Stands for apptainer exec: Python has another name inside than outside, and the working directory is the image's.
shift
while [[ $1 == --* ]]; do echo "$1" >>"$(dirname "$0")/binds"; shift; done
shift
PATH="$(dirname "$0")/inside:$PATH"
cd /
exec "$@"
"""


def test_a_run_in_a_container(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = tmp_path / "commands"
    (commands / "inside").mkdir(parents=True)
    (commands / "apptainer").write_text(APPTAINER)
    (commands / "inside" / "python-inside").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for path in (commands / "apptainer", commands / "inside" / "python-inside"):
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    Path("image.sif").touch()
    options = ["--container", "image.sif", "--python", "python-inside", "--nodes", "2", "--replicas", "2"]
    with training(Path("runs"), *options, "--tokens", "20000") as process:
        assert process.wait(timeout=240) == 0, Path("log").read_text()
    (report,) = Path("runs").glob("*/report.json")
    assert json.loads(report.read_text())["summary"]["ok"] is True
    assert f"--bind={tmp_path}/runs" in (commands / "binds").read_text().splitlines()
