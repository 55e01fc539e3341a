"""Each host has a step of its own: what befalls it costs the others nothing, and a broken step is mended."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from slurm_nodes import Cluster, read, wait_until
from slurm_programs import SURVIVES

from monarch_slurm.job import Phase, SlurmJob, follow
from monarch_slurm.job.sick import sick_nodes

Program = Callable[[str], list[str]]


def submit(cluster: Cluster, program: Program) -> SlurmJob:
    job = SlurmJob({"hosts": 4})
    job.apply(program(SURVIVES))
    wait_until(lambda: "answering: n1 n2 n3 n4" in read(job.folder / "controller.log"), "all nodes to answer")
    return job


def agents(cluster: Cluster, nodes: Iterable[str]) -> dict[str, set[int]]:
    return {node: cluster.agents(node) for node in nodes}


def finish(job: SlurmJob) -> None:
    Path("stop").touch()
    assert follow(job, io.StringIO()) == 0
    wait_until(lambda: job.status().phase is Phase.ENDED, "end of the job")
    assert job.status().state == "COMPLETED"


def kill_srun(cluster: Cluster, which: str) -> None:
    cluster.call("exec", "n1", "pkill", "-9", which, "-f", "^srun .*--nodelist=n2 ")


def variables(pid: int) -> dict[str, str]:
    items = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(item.split("=", 1) for item in items if "=" in item)


def test_a_host_has_all_that_the_job_has_on_its_node(cluster: Cluster, program: Program) -> None:
    job = SlurmJob({"hosts": 2}, gpus_per_node=8, cpus_per_task=5, mem="1G", slurm_args=["-w", "n[2-3]", "--gpus=16"])
    job.apply(program(SURVIVES))
    wait_until(lambda: "answering: n2 n3" in read(job.folder / "controller.log"), "both nodes to answer")
    for index, node in enumerate(("n2", "n3")):
        env = variables(min(cluster.agents(node)))
        assert env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
        assert (env["SLURM_CPUS_ON_NODE"], env["SLURM_CPUS_PER_TASK"]) == ("16", "5")  # all of an exclusive node
        assert (env["SLURM_NODEID"], env["SLURM_PROCID"]) == (str(index), str(index))
        assert (env["SLURM_NNODES"], env["SLURM_NTASKS"], env["SLURM_GPUS"]) == ("2", "2", "16")
    steps = cluster.run("scontrol", "show", "step", str(job.job_id)).split("\n\n")
    assert sum("Name=host" in step and "cpu=16,gres/gpu=8" in step for step in steps) == 2, steps
    finish(job)


@pytest.mark.slow
def test_a_node_that_boots_again_costs_the_others_nothing(cluster: Cluster, program: Program) -> None:
    job = submit(cluster, program)
    others = agents(cluster, ("n1", "n2", "n4"))
    cluster.kill("n3")
    wait_until(lambda: "answering: n1 n2 n4" in read(job.folder / "controller.log"), "the others to answer")
    wait_until(lambda: "n3" in sick_nodes(Path("runs")), "n3 to be remembered as sick")
    cluster.heal("n3")
    wait_until(lambda: "the step of host n3 ended" in read(job.folder / "batch.log"), "srun to notice")
    wait_until(
        lambda: cluster.agents("n3") or "Slurm has taken the node" in read(job.folder / "batch.log"),
        "another agent, if the node is still in the job",
    )
    wait_until(
        lambda: "n3" not in sick_nodes(Path("runs")) or "Slurm has taken the node" in read(job.folder / "batch.log"),
        "n3 to be well when it has joined again",
    )
    assert agents(cluster, others) == others
    lines = read(job.folder / "controller.log").splitlines()
    assert [line for line in lines if "takes the place of the lost host n3" not in line][-1] == "answering: n1 n2 n4"
    finish(job)


def test_a_killed_srun_costs_its_own_host_alone(cluster: Cluster, program: Program) -> None:
    job = submit(cluster, program)
    before = agents(cluster, cluster.nodes)
    kill_srun(cluster, "-o")  # its shepherd, the younger process, then ends the step
    wait_until(lambda: "host n2: starting its step again" in read(job.folder / "batch.log"), "the head to notice")
    wait_until(lambda: cluster.agents("n2") and not cluster.agents("n2") & before["n2"], "another agent")
    assert agents(cluster, before.keys() - {"n2"}) == {node: before[node] for node in before if node != "n2"}
    finish(job)


def test_a_srun_that_is_killed_with_its_shepherd_costs_nobody_anything(cluster: Cluster, program: Program) -> None:
    job = submit(cluster, program)
    before = agents(cluster, cluster.nodes)
    kill_srun(cluster, "-n")
    kill_srun(cluster, "-o")
    wait_until(lambda: "watching the task" in read(job.folder / "logs" / "n2.log"), "the new task to find the old one")
    assert agents(cluster, cluster.nodes) == before
    assert read(job.folder / "controller.log") == "ready\nanswering: n1 n2 n3 n4\n"
    finish(job)


def test_a_killed_slurmstepd_costs_nobody_anything(cluster: Cluster, program: Program) -> None:
    job = submit(cluster, program)
    before = agents(cluster, cluster.nodes)
    cluster.call("exec", "n2", "pkill", "-9", "slurmstepd")
    wait_until(lambda: "host n2: starting its step again" in read(job.folder / "batch.log"), "the head to notice")
    wait_until(lambda: "watching the task" in read(job.folder / "logs" / "n2.log"), "the new task to find the old one")
    assert agents(cluster, cluster.nodes) == before
    assert read(job.folder / "controller.log") == "ready\nanswering: n1 n2 n3 n4\n"
    # The new step counts as the old one did.
    cluster.call("exec", "n2", "pkill", "-9", "-f", "monarch_slurm.host --folder")
    wait_until(lambda: cluster.agents("n2") and not cluster.agents("n2") & before["n2"], "another agent")
    assert agents(cluster, before.keys() - {"n2"}) == {node: before[node] for node in before if node != "n2"}
    finish(job)


def test_a_job_whose_slurmstepd_was_killed_ends_in_order(cluster: Cluster, program: Program) -> None:
    job = submit(cluster, program)
    cluster.call("exec", "n2", "pkill", "-9", "slurmstepd")
    finish(job)
