"""What Slurm does to a running job, or fails to: the job's hosts and its program notice nothing."""

from __future__ import annotations

import io
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from slurm_nodes import Cluster, read, wait_until
from slurm_programs import SURVIVES

from monarch_slurm.job import Phase, SlurmJob, follow

Program = Callable[[str], list[str]]

SILENCE = 6.0
"""Seconds; a host whose machine is silent for three is lost."""

STOPPED = 10.0
"""Seconds that an agent is stopped for."""


def submit(program: Program, **options: object) -> SlurmJob:
    job = SlurmJob({"hosts": 2}, nodelist="n[1-2]", **options)  # type: ignore[arg-type]
    job.apply(program(SURVIVES.replace('"hosts": 4', '"hosts": 2')))
    wait_until(lambda: "answering: n1 n2" in read(job.folder / "controller.log"), "both nodes to answer")
    return job


def agents(cluster: Cluster) -> dict[str, set[int]]:
    return {node: cluster.agents(node) for node in ("n1", "n2")}


def finish(job: SlurmJob) -> None:
    """End the job; nothing may have befallen it."""
    Path("stop").touch()
    assert follow(job, io.StringIO()) == 0
    wait_until(lambda: job.status().phase is Phase.ENDED, "end of the job")
    assert job.status().state == "COMPLETED"
    assert read(job.folder / "controller.log") == "ready\nanswering: n1 n2\n"


def pass_time(seconds: float) -> None:
    end = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= end, "time to pass")


def test_a_suspended_job_loses_no_host(cluster: Cluster, program: Program) -> None:
    job = submit(program)
    before = agents(cluster)
    cluster.run("scontrol", "suspend", str(job.job_id))
    wait_until(lambda: job.status().state == "SUSPENDED", "the job to be suspended")
    pass_time(SILENCE)
    cluster.run("scontrol", "resume", str(job.job_id))
    wait_until(lambda: job.status().state == "RUNNING", "the job to be resumed")
    pass_time(SILENCE)  # what counts the silence looks again
    assert agents(cluster) == before
    finish(job)


def test_a_stopped_agent_is_not_lost_and_a_cut_off_node_is(cluster: Cluster, program: Program) -> None:
    job = submit(program)
    log = job.folder / "controller.log"
    before = agents(cluster)
    for node in ("n2", "n1"):  # on another machine than the controller, and on the same one
        cluster.call("exec", node, "pkill", "-STOP", "-f", "monarch_slurm.host --folder")
        pass_time(STOPPED)
        cluster.call("exec", node, "pkill", "-CONT", "-f", "monarch_slurm.host --folder")
        pass_time(SILENCE)
        assert agents(cluster) == before
        assert read(log) == "ready\nanswering: n1 n2\n"
    # Stopped first, so that nothing but the silence of its machine tells.
    cluster.call("exec", "n2", "pkill", "-STOP", "-f", "monarch_slurm.host --folder")
    pass_time(SILENCE)
    assert "lost" not in read(log)
    cluster.cut("n2")
    wait_until(lambda: "host n2 is lost: nothing was heard from it for 3 s" in read(log), "the loss of n2")
    wait_until(lambda: "answering: n1\n" in read(log), "n1 to answer alone")
    cluster.call("exec", "n2", "pkill", "-CONT", "-f", "monarch_slurm.host --folder")
    Path("stop").touch()
    follow(job, io.StringIO())
    wait_until(lambda: job.status().phase is Phase.ENDED, "end of the job")


def test_a_slurmd_that_is_killed_and_started_again_costs_nothing(cluster: Cluster, program: Program) -> None:
    job = submit(program)
    before = agents(cluster)
    for node in ("n1", "n2"):
        cluster.call("kill-daemon", node)
        cluster.call("heal", node)
    assert agents(cluster) == before
    finish(job)


def test_an_outage_of_slurmctld_costs_nothing(cluster: Cluster, program: Program) -> None:
    job = submit(program)
    before = agents(cluster)
    pass_time(SILENCE)  # slurmctld writes down what it knows every five seconds
    cluster.call("kill-daemon", "ctl")
    try:
        # The step of n2 breaks while nobody can be asked whether the node is still the job's.
        cluster.call("exec", "n1", "pkill", "-9", "-n", "-f", "^srun .*--nodelist=n2 ")
        cluster.call("exec", "n1", "pkill", "-9", "-o", "-f", "^srun .*--nodelist=n2 ")
        wait_until(lambda: "the step of host n2 ended" in read(job.folder / "batch.log"), "the head to notice")
        assert agents(cluster) == before
    finally:
        cluster.call("heal", "ctl")
    wait_until(lambda: "watching the task" in read(job.folder / "logs" / "n2.log"), "another step for n2")
    assert agents(cluster) == before
    finish(job)


def test_a_job_that_is_launched_twice_runs_once(cluster: Cluster, program: Program) -> None:
    job = submit(program)
    before = agents(cluster)
    command = ["srun", f"--jobid={job.job_id}", "--overlap", "-N1", "-n1", "-w", "n2", "--mpi=none"]
    second = subprocess.run(
        [*command, "env", "SLURM_JOB_NUM_NODES=1", "bash", str(job.folder / "submission.sh")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert second.returncode != 0
    assert "this job runs already: its head is pid " in second.stderr, second.stderr
    assert " on node n1 since " in second.stderr
    assert " on node n2); this second start ends" in second.stderr
    assert agents(cluster) == before
    finish(job)


def test_two_jobs_on_one_node_do_not_meet(cluster: Cluster, program: Program) -> None:
    command = program(SURVIVES.replace('"hosts": 4', '"hosts": 1'))
    jobs = [SlurmJob({"hosts": 1}, nodelist="n2", exclusive=False, mem="1G") for _ in range(2)]
    for job in jobs:
        job.apply(command)
    for job in jobs:
        wait_until(lambda job=job: "answering: n2" in read(job.folder / "controller.log"), "the node to answer")
    published = [read(job.folder / "controller.json") for job in jobs]
    assert len(set(published)) == 2
    jobs[0].kill()
    wait_until(lambda: jobs[0].status().phase is Phase.ENDED, "end of the first job")
    assert jobs[1].status().phase is Phase.RUNNING
    Path("stop").touch()
    assert follow(jobs[1], io.StringIO()) == 0
    assert read(jobs[1].folder / "controller.log") == "ready\nanswering: n2\n"
