"""Nodes are examined through Slurm: outside of a job, inside of one, and when one of them is cut off."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from slurm_nodes import Cluster, wait_until

DOCTOR = [sys.executable, "-m", "monarch_slurm", "doctor"]


def test_nodes_outside_of_a_job_and_one_that_is_cut_off(cluster: Cluster) -> None:
    done = subprocess.run([*DOCTOR, "--nodes", "n[2-3]", "--json"], capture_output=True, text=True)
    assert done.returncode in (0, 3), done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert sorted(told["facts"]) == ["n2", "n3"]
    assert {finding["host"] for finding in told["findings"]} == {"n2", "n3"}

    wait_until(cluster.is_idle, "the end of the step that asked")
    cluster.cut("n3")
    done = subprocess.run([*DOCTOR, "--nodes", "n[2-3]", "--timeout", "5"], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert "BAD   n3: answer: none within 5 s" in done.stdout
    assert "leave out: --exclude=" in done.stdout


def test_nodes_of_the_job_around(cluster: Cluster) -> None:
    done = subprocess.run(
        ["salloc", "-N2", "-w", "n[1,4]", *DOCTOR, "--nodes", "all", "--json"], capture_output=True, text=True
    )
    assert done.returncode in (0, 3), done.stderr
    assert sorted(json.loads(done.stdout)["facts"]) == ["n1", "n4"]


def test_a_node_that_is_not_there(cluster: Cluster) -> None:
    done = subprocess.run([*DOCTOR, "--nodes", "n9"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "error: srun could not reach n9" in done.stderr
    assert "Invalid node name" in done.stderr


def test_the_wait_for_nodes_that_are_not_free_ends_and_says_why(cluster: Cluster) -> None:
    job = cluster.run(
        "sbatch", "--parsable", "-w", "n2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1000"
    ).strip()
    cluster.run("scontrol", "update", "nodename=n3", "state=drain", "reason=bad fan")
    try:
        wait_until(lambda: cluster.run("squeue", "-h", "-t", "R", "-o", "%i").split() == [job], "the other job")
        done = subprocess.run([*DOCTOR, "--nodes", "n[2-4]", "--timeout", "4"], capture_output=True, text=True)
        why = f"n2 is allocated to job {job} of root; n3 is drained (bad fan)"
        assert f"waiting for Slurm to allocate n[2-4]: {why}\n" in done.stderr
        assert f"error: Slurm did not allocate n[2-4] within 4 s: {why}. Examine other nodes" in done.stderr
        assert done.returncode == 1
        wait_until(lambda: cluster.run("squeue", "-h", "-o", "%i").split() == [job], "doctor's own job to be gone")
    finally:
        cluster.run("scontrol", "update", "nodename=n3", "state=resume")
