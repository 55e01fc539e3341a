"""Spare nodes on a real cluster: a node that is lost, does not start or is not fit is replaced by a spare."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_nodes import Cluster, read, wait_until
from slurm_programs import KEPT

from monarch_slurm.job import JobSpecError, NodeSpec, Phase, SlurmJob, follow
from monarch_slurm.job.folder import JobFolder

Program = Callable[[str], list[str]]


def end(job: SlurmJob) -> None:
    Path("stop").touch()
    out = io.StringIO()
    assert follow(job, out) == 0, out.getvalue()
    wait_until(lambda: job.status().phase is Phase.ENDED, "end of the job")


@pytest.mark.parametrize(
    "how", ["agent", pytest.param("kill", marks=pytest.mark.slow), pytest.param("cut", marks=pytest.mark.slow)]
)
def test_a_spare_takes_the_place_of_a_lost_node(
    cluster: Cluster, program: Program, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONARCH_SLURM_MESH_ORPHAN_TIMEOUT", "5")
    job = SlurmJob({"hosts": 3}, spares=1)
    job.apply(program(KEPT))
    log = job.folder / "controller.log"
    wait_until(lambda: "answering: n1 n2 n3" in read(log), "all nodes to answer")
    if how == "agent":
        cluster.call("exec", "n2", "pkill", "-9", "-f", "monarch_slurm.host --folder")
    else:
        getattr(cluster, how)("n2")
    wait_until(lambda: "answering: n1 n4 n3" in read(log), "the spare to answer in place of n2")
    assert "told: restarted, n2 replaced by n4" in read(log)
    assert "host n2: n4 takes its place" in read(log)
    assert "fault:" not in read(log)
    assert (".sick-nodes.json" in os.listdir("runs")) == (how != "agent")
    if how == "cut":
        wait_until(lambda: not cluster.agents("n2"), "the lease of n2 to end")
    if how == "agent":
        wait_until(lambda: "joined: n1 n2 n3 n4" in read(log).partition("n1 n4 n3")[2], "n2 to be a spare")
        cluster.call("exec", "n4", "pkill", "-9", "-f", "monarch_slurm.host --folder")
        wait_until(lambda: "answering: n1 n2 n3" in read(log).partition("n4 n3")[2], "n2 to be of use again")
    end(job)


def test_a_spare_of_the_same_kind_takes_the_place_in_a_heterogeneous_job(cluster: Cluster, program: Program) -> None:
    job = SlurmJob({"head": NodeSpec(1, spares=1, nodelist="n[1-2]"), "hosts": NodeSpec(1, spares=1, mem="1G")})
    job.apply(program(KEPT))
    log = job.folder / "controller.log"
    wait_until(lambda: "answering: n3" in read(log), "n3 to answer")
    cluster.call("exec", "n3", "pkill", "-9", "-f", "monarch_slurm.host --folder")
    wait_until(lambda: "answering: n4" in read(log), "n4 to answer in its place")
    assert "host n3: n4 takes its place" in read(log)
    end(job)


def test_a_node_whose_agent_cannot_start_is_left_out(cluster: Cluster, program: Program) -> None:
    Path("sitecustomize.py").write_text(
        "import os, sys\nif os.environ.get('SLURMD_NODENAME') == 'n2':\n    sys.modules['monarch_slurm'] = None\n"
    )
    job = SlurmJob({"hosts": 2}, spares=1, setup=[f"export PYTHONPATH={Path.cwd()}:$PYTHONPATH"])
    job.apply(program(KEPT))
    log = job.folder / "controller.log"
    wait_until(lambda: "answering: n1 n3" in read(log), "n1 and the spare to answer")
    assert "host n2 is left out (its agent did not start): n3 takes its place" in read(log)
    end(job)


def test_a_node_that_is_not_fit_is_left_out(cluster: Cluster, program: Program, request: pytest.FixtureRequest) -> None:
    cluster.call("exec", "n2", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm")
    request.addfinalizer(lambda: cluster.call("exec", "n2", "umount", "/dev/shm"))
    job = SlurmJob({"hosts": 2}, spares=1)
    job.apply(program(KEPT))
    log = job.folder / "controller.log"
    wait_until(lambda: "answering: " in read(log), "the program")
    assert "answering: n1 n3" in read(log), read(log)
    assert "host n2 is left out (shared memory: 0.0 of 0.0 GiB free; mount it larger" in read(log)
    end(job)


@pytest.mark.slow
def test_slurm_is_asked_for_another_node(cluster: Cluster, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_SLURM_MESH_ORPHAN_TIMEOUT", "5")
    submit = [sys.executable, "-m", "monarch_slurm", "submit", "--nodes=3", "--on-lost=request", "--json"]
    folder = Path(json.loads(cluster.run(*submit, *program(KEPT)))["folder"])
    (job_id,) = map(int, cluster.run("squeue", "-h", "-o", "%i").split())
    job = SlurmJob({"hosts": 3})
    job.adopt(job_id, JobFolder(folder))
    log = job.folder / "controller.log"
    wait_until(lambda: "answering: n1 n2 n3" in read(log), "all nodes to answer")
    cluster.kill("n2")
    wait_until(lambda: "answering: n1 n4 n3" in read(log), "the new node to answer in place of n2")
    assert "told: restarted, n2 replaced by a host that is asked for" in read(log)
    assert "fault:" not in read(log)
    (small,) = [line for line in cluster.run("squeue", "-h", "-o", "%i %j %N").splitlines() if "-more" in line]
    assert small.split()[1:] == ["monarch_job-more", "n4"]
    # The cluster has no further node, so that the next request is refused, and the procs of n3 are given up.
    cluster.kill("n3")
    wait_until(lambda: "no other node came" in read(log), "the refusal")
    wait_until(lambda: "told: failed" in read(log), "the owner to be told")
    end(job)
    wait_until(lambda: not cluster.run("squeue", "-h").strip(), "the end of all jobs")
    assert "COMPLETED" in cluster.run("scontrol", "show", "job", small.split()[0])


@pytest.mark.parametrize("how", ["program", "scancel"])
def test_a_request_that_waits_is_not_left_in_the_queue(
    cluster: Cluster, program: Program, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONARCH_SLURM_UNRESPONSIVE_AGENT_TIMEOUT", "3")
    blocking = cluster.run("sbatch", "--parsable", "-w", "n4", "--exclusive", "--wrap", "sleep 300").strip()
    wait_until(lambda: "n4" in cluster.run("squeue", "-h", "-t", "RUNNING", "-o", "%N"), "n4 to be busy")
    job = SlurmJob({"hosts": 3}, on_lost="request")
    job.apply(program(KEPT))
    log = job.folder / "controller.log"
    wait_until(lambda: "answering: n1 n2 n3" in read(log), "all nodes to answer")
    # Silent, but there: its step is not started again, so nothing comes back on n2. Its machine answers.
    cluster.call("exec", "n2", "pkill", "-STOP", "-f", "monarch_slurm.host --folder")
    wait_until(lambda: "-more" in cluster.run("squeue", "-h", "-t", "PENDING", "-o", "%j"), "the request")
    if how == "program":
        Path("stop").touch()
    else:
        job.kill()
    cluster.call("exec", "n2", "pkill", "-CONT", "-f", "monarch_slurm.host --folder")
    wait_until(lambda: cluster.run("squeue", "-h", "-o", "%i").split() == [blocking], "the end of all other jobs")


def test_what_makes_no_sense() -> None:
    for kwargs in ({"spares": -1}, {"spares": True}, {"on_lost": "pray"}):
        with pytest.raises(JobSpecError):
            SlurmJob({"hosts": 2}, **kwargs)  # type: ignore[arg-type]
    with pytest.raises(JobSpecError, match="of which kind"):
        SlurmJob({"hosts": 2, "big": NodeSpec(1, mem="1G")}, spares=1)
