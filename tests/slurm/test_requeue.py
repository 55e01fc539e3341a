"""Slurm is about to end a job: its program saves, the job starts again, and the program goes on where it was."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_nodes import Cluster, read, wait_until
from slurm_programs import COUNTS

from monarch_slurm.job import JobEndedError, Phase, SlurmJob, follow

Program = Callable[[str], list[str]]


def submit(program: Program, requeue: bool = True, partition: str | None = None) -> SlurmJob:
    job = SlurmJob({"hosts": 2}, requeue=requeue, partition=partition)
    job.apply(program(COUNTS))
    wait_until(lambda: "counts from 0" in read(job.folder / "controller.log"), "the program")
    return job


def saved() -> int:
    return int(read(Path("count")) or 0)


def finish(cluster: Cluster, job: SlurmJob) -> list[str]:
    """Wait until the job has started again and let it end; return its log's lines."""
    wait_until(lambda: read(job.folder / "controller.log").count("counts from") == 2, "the second start")
    Path("stop").touch()
    assert follow(job, io.StringIO()) == 0
    wait_until(lambda: job.status().phase is Phase.ENDED, "end of the job")
    assert job.status().state == "COMPLETED"
    lines = [line for line in read(job.folder / "controller.log").splitlines() if line.startswith(("saved", "counts"))]
    assert lines[1] == f"saved {saved()}"
    assert lines[2].startswith(f"counts from {saved()} on ")
    assert saved() > 0
    return lines


def test_a_job_that_is_given_notice_saves_and_goes_on(cluster: Cluster, program: Program) -> None:
    job = submit(program)
    cluster.run("scancel", "--batch", "--signal=USR2", str(job.job_id))  # as --signal does near the time limit
    finish(cluster, job)
    said = read(job.folder / "batch.log")
    assert "WARNING monarch_slurm.job.batch: the time limit is near: asking the program to end" in said
    assert "Slurm starts the job again" in said


def test_a_job_that_is_preempted_saves_and_goes_on(cluster: Cluster, program: Program) -> None:
    job = submit(program)
    urgent = ["srun", "--partition=urgent", "--nodes=4", "--exclusive", "hostname"]
    assert sorted(cluster.run(*urgent).split()) == list(cluster.nodes)
    finish(cluster, job)


@pytest.mark.slow
def test_a_job_that_is_preempted_with_notice_saves_and_is_requeued_once(cluster: Cluster, program: Program) -> None:
    job = submit(program, partition="graceful")
    cluster.run("srun", "--partition=urgent", "--nodes=4", "--exclusive", "hostname")
    finish(cluster, job)
    said = read(job.folder / "batch.log")
    assert "WARNING monarch_slurm.job.batch: a preemption is near: asking the program to end" in said
    assert "Slurm starts the job again" in said  # as we have asked it to, before it would have done so by itself
    assert " Restarts=1 " in cluster.run("scontrol", "show", "job", "-o", str(job.job_id))


def test_a_job_that_is_requeued_leaves_a_drained_node_with_all_that_it_had(cluster: Cluster, program: Program) -> None:
    job = submit(program)
    head = read(job.folder / "controller.log").split()[-1]
    cluster.run("scontrol", "update", f"nodename={head}", "state=drain", "reason=test")
    try:
        assert job.status().phase is Phase.RUNNING
        cluster.run("scontrol", "requeue", str(job.job_id))
        assert finish(cluster, job)[2].split()[-1] != head
    finally:
        cluster.run("scontrol", "update", f"nodename={head}", "state=resume")


def test_a_job_that_may_not_start_again_tells_that_it_has_saved(cluster: Cluster, program: Program) -> None:
    job = submit(program, requeue=False)
    cluster.run("scancel", "--batch", "--signal=USR2", str(job.job_id))
    assert follow(job, io.StringIO()) == 75
    assert read(job.folder / "controller.log").splitlines()[-1] == f"saved {saved()}"
    wait_until(lambda: job.status().phase is Phase.ENDED, "end of the job")
    assert job.status().exit_code == 75


def test_a_job_that_is_cancelled_saves_and_does_not_start_again(cluster: Cluster, program: Program) -> None:
    job = submit(program)
    job.kill()
    with pytest.raises(JobEndedError, match="is CANCELLED"):
        follow(job, io.StringIO())
    assert read(job.folder / "controller.log").splitlines()[-1] == f"saved {saved()}"
