"""Agents of a real allocation join a controller, inside and outside of it, and losses of nodes are survived."""

from __future__ import annotations

import io
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_nodes import Cluster, read, wait_until
from slurm_programs import SURVIVES, WHO

from monarch_slurm.job import HostsTakenError, JobEndedError, Phase, SlurmJob, follow
from monarch_slurm.job.folder import JobFolder
from monarch_slurm.job.follow import follow_job

Program = Callable[[str], list[str]]

INSIDE = (
    WHO
    + """
state = SlurmJob({"trainers": 1}).state()  # inside of the job, its hosts are what there is
assert (len(state.trainers), len(state.spare)) == (3, 1)
for mesh in (state.trainers, state.spare):
    who = mesh.spawn_procs({"gpus": 2}).spawn("who", Who)
    print(sorted(set(who.host.call().get().values())), flush=True)
sys.exit(5)
"""
)

OUTSIDE = (
    WHO
    + """
job = SlurmJob({"hosts": 4})
hosts = job.state("job.pkl").hosts
procs = hosts.spawn_procs()
who = procs.spawn("who", Who)
print(sorted(who.host.call().get().values()), flush=True)
print("folder", job.folder, job.job_id, flush=True)
if sys.argv[1] == "kill":
    job.kill()
elif sys.argv[1] == "crash":
    os.kill(os.getpid(), 9)
"""
)


def test_the_program_on_the_head_drives_all_nodes(cluster: Cluster, program: Program) -> None:
    job = SlurmJob({"trainers": 3, "spare": 1})
    job.apply(program(INSIDE))
    out = io.StringIO()
    assert follow(job, out) == 5, out.getvalue()
    expected = [(node, node, str(index)) for index, node in enumerate(cluster.nodes)]
    assert out.getvalue() == f"{expected[:3]}\n{expected[3:]}\n"
    wait_until(lambda: job.status().phase is Phase.ENDED, "end of the job")
    assert job.status().exit_code == 5
    assert not (job.folder / "controller.json").exists()


@pytest.mark.parametrize("how", ["leave", "kill", "crash"])
def test_a_program_outside_drives_all_nodes(
    cluster: Cluster, program: Program, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONARCH_SLURM_MESH_ORPHAN_TIMEOUT", "3")
    done = subprocess.run([*program(OUTSIDE), how], capture_output=True, text=True, timeout=120)
    assert done.returncode == (-9 if how == "crash" else 0), done.stderr
    answers, folder = done.stdout.splitlines()
    assert answers == str([(node, node, str(index)) for index, node in enumerate(cluster.nodes)])
    assert "is RUNNING" in done.stderr
    job_id = folder.split()[2]
    wait_until(lambda: not cluster.run("squeue", "-h", "-j", job_id).strip(), "end of the job")


def test_hosts_serve_one_program_only(cluster: Cluster, program: Program) -> None:
    job = SlurmJob({"hosts": 1})
    job.apply(program(SURVIVES))
    wait_until(lambda: "ready" in read(job.folder / "controller.log"), "the program")
    assert not job.can_run(SlurmJob({"hosts": 1}))
    with pytest.raises(HostsTakenError):
        job.state(None)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "cut"])
def test_the_loss_of_a_node_is_survived(
    cluster: Cluster, program: Program, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONARCH_SLURM_MESH_ORPHAN_TIMEOUT", "5")
    job = SlurmJob({"hosts": 4})
    job.apply(program(SURVIVES))
    log = job.folder / "controller.log"
    wait_until(lambda: "answering: n1 n2 n3 n4" in read(log), "all nodes to answer")
    cluster.kill("n3") if how == "kill" else cluster.cut("n3")
    wait_until(lambda: "answering: n1 n2 n4" in read(log), "the others to answer")
    assert "n3" in next(line for line in read(log).splitlines() if line.startswith("fault:"))
    if how == "cut":
        wait_until(lambda: not cluster.agents("n3"), "the lease of n3 to end")
    wait_until(lambda: "n3" not in job.status().nodes and job.status().nodes == "n[1-2,4]", "Slurm to notice")
    assert job.status().state == "RUNNING"
    Path("stop").touch()
    assert follow(job, io.StringIO()) == 0
    wait_until(lambda: job.status().phase is Phase.ENDED, "end of the job")
    assert (job.status().state, job.status().exit_code) == ("COMPLETED", 0)
    assert "Restarts=0" in cluster.run("scontrol", "show", "job", str(job.job_id))
    cluster.heal()
    assert cluster.run("srun", "-w", "n3", "hostname") == "n3\n"


@pytest.mark.slow
def test_the_loss_of_the_head_ends_the_job(cluster: Cluster, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_SLURM_MESH_ORPHAN_TIMEOUT", "5")
    job = SlurmJob({"hosts": 4})
    job.apply(program(SURVIVES))
    wait_until(lambda: "answering: n1 n2 n3 n4" in read(job.folder / "controller.log"), "all nodes to answer")
    cluster.kill("n1")
    for node in ("n2", "n3", "n4"):
        wait_until(lambda node=node: not cluster.agents(node), f"end of the agent of {node}")
    wait_until(lambda: job.status().phase is Phase.ENDED, "end of the job")
    with pytest.raises(JobEndedError, match="the head node is lost: ending the job"):
        follow(job, io.StringIO())


@pytest.mark.slow
def test_a_job_may_start_again_when_its_head_is_lost(
    cluster: Cluster, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONARCH_SLURM_MESH_ORPHAN_TIMEOUT", "5")
    job = SlurmJob({"hosts": 3}, requeue=True)
    job.apply(program("import os, time\nprint(os.environ.get('SLURM_RESTART_COUNT'), flush=True)\n" + SURVIVES))
    log = job.folder / "controller.log"
    wait_until(lambda: "answering: " in read(log), "the program")
    told: list[str] = []
    codes: list[int] = []
    folder = JobFolder(job.folder)
    follower = threading.Thread(
        target=lambda: codes.append(follow_job(job.job_id, folder, io.StringIO(), told.append)), daemon=True
    )
    follower.start()
    wait_until(lambda: any("is RUNNING" in line for line in told), "the follower to see the job")
    cluster.kill("n1")
    wait_until(lambda: "\n1\n" in read(log) and "answering: n2 n3 n4" in read(log), "the program's second start", 240)
    wait_until(lambda: any("has started again (restart 1); its head is node n2" in line for line in told), "the news")
    Path("stop").touch()
    follower.join(90)
    assert codes == [0]
    news = "\n".join(told)
    assert "nothing was heard from head node n1 for " in news
    assert "has started again (restart 1)" in news.partition("head node is lost: starting the job again")[2]


def test_an_agent_that_is_killed_leaves_the_others(cluster: Cluster, program: Program) -> None:
    job = SlurmJob({"hosts": 4})
    job.apply(program(SURVIVES))
    log = job.folder / "controller.log"
    wait_until(lambda: "answering: n1 n2 n3 n4" in read(log), "all nodes to answer")
    cluster.call("exec", "n2", "pkill", "-9", "-f", "monarch_slurm.host --folder")
    wait_until(lambda: "answering: n1 n3 n4" in read(log), "the others to answer")
    wait_until(lambda: "host n2: starting its step again" in read(job.folder / "batch.log"), "another try")
    wait_until(lambda: cluster.agents("n2"), "another agent")
    Path("stop").touch()
    assert follow(job, io.StringIO()) == 0


def test_an_agent_that_cannot_start_is_named(cluster: Cluster, program: Program) -> None:
    Path("sitecustomize.py").write_text(
        "import os, sys\nif os.environ.get('SLURMD_NODENAME') == 'n2':\n    sys.modules['monarch_slurm'] = None\n"
    )
    job = SlurmJob({"hosts": 2}, setup=[f"export PYTHONPATH={Path.cwd()}:$PYTHONPATH"], slurm_args=["-w", "n[1-2]"])
    job.apply(program(WHO + "SlurmJob({'hosts': 2}).state()\n"))
    out = io.StringIO()
    assert follow(job, out) == 1
    assert "error: the agents of 1 of 2 hosts could not start" in out.getvalue()
    assert "host n2 has failed: exit code 1 (srun: error: n2: task 0: Exited with exit code 1)" in out.getvalue()
    assert "No module named 'monarch_slurm." in out.getvalue()
