"""Nodes that were lost or not fit are left out of the next job, as far as Slurm has others."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

from slurm_nodes import Cluster

from monarch_slurm.job import NodeSpec, SlurmJob, follow
from monarch_slurm.job.sick import note_sick, note_silent

SUBMIT = [sys.executable, "-m", "monarch_slurm", "submit", "-f"]


def test_submit_leaves_out_sick_nodes_and_says_which(cluster: Cluster) -> None:
    Path("runs").mkdir()
    note_silent(Path("runs"), "n1", "nothing was heard from it for 3 s")
    command = ["--nodes", "2", "bash", "-c", "hostname"]
    done = subprocess.run([*SUBMIT, *command], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "n2\n"), done.stderr
    assert "leaving out nodes that were lost or not fit: n1 (nothing was heard from it for 3 s; until " in done.stderr
    done = subprocess.run([*SUBMIT, "--no-avoid", *command], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "n1\n"), done.stderr
    assert "leaving out" not in done.stderr
    dry = subprocess.run([*SUBMIT[:-1], "--dry-run", *command], capture_output=True, text=True, check=True)
    assert "#SBATCH --exclude=n1\n" in dry.stdout


def test_a_job_of_several_components_does_not_wait_for_nodes_that_are_down(cluster: Cluster) -> None:
    Path("runs").mkdir()
    note_sick(Path("runs"), {"n2": "GPU 3 does not answer"})
    cluster.run("scontrol", "update", "nodename=n4", "state=drain", "reason=bad fan")
    try:
        job = SlurmJob({"a": NodeSpec(1), "b": NodeSpec(1), "c": NodeSpec(1)})  # n4 drained, n2 sick: n2 is needed
        job.apply(["bash", "-c", "echo ran"])
        out = io.StringIO()
        assert (follow(job, out), out.getvalue()) == (0, "ran\n")
        smaller = SlurmJob({"a": NodeSpec(1), "b": NodeSpec(1)})
        smaller.apply(["bash", "-c", "echo ran"])
        assert follow(smaller, out) == 0
        assert set(smaller.status().nodes.split(",")) == {"n1", "n3"}
    finally:
        cluster.run("scontrol", "update", "nodename=n4", "state=resume")
