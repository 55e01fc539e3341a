"""Jobs of several kinds of nodes, arrays of jobs, and jobs whose nodes are checked or wait for others."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

from slurm_nodes import Cluster, wait_until
from slurm_programs import WHO

from monarch_slurm.job import NodeSpec, Phase, SlurmJob, follow
from monarch_slurm.job.status import _from_sacct, _from_scontrol, run_command

Program = Callable[[str], list[str]]

HET = (
    WHO
    + """
class Where(Actor):
    @endpoint
    def gpus(self):
        return os.environ["SLURMD_NODENAME"], os.environ["SLURM_NODEID"], os.environ.get("CUDA_VISIBLE_DEVICES")

state = SlurmJob({"trainers": 1}).state()
for mesh in (state.trainers, state.data):
    print(*mesh.spawn_procs().spawn("where", Where).gpus.call().get().values(), flush=True)
"""
)


def test_the_meshes_of_a_heterogeneous_job_have_nodes_of_their_own_kind(cluster: Cluster, program: Program) -> None:
    job = SlurmJob(
        {"trainers": NodeSpec(2, gpus_per_node=8, nodelist="n[2-3]"), "data": NodeSpec(1, mem="1G", nodelist="n1")}
    )
    job.apply(program(HET))
    out = io.StringIO()
    assert follow(job, out) == 0, out.getvalue()
    gpus = "0,1,2,3,4,5,6,7"
    assert out.getvalue() == f"('n2', '0', '{gpus}') ('n3', '1', '{gpus}')\n('n1', '2', None)\n"
    wait_until(lambda: job.status().phase is Phase.ENDED, "end of the job")
    assert (job.status().state, job.status().nodes) == ("COMPLETED", "n[2-3],n1")
    assert (_from_scontrol(job.job_id, run_command) or job.status()).nodes == "n[2-3],n1"
    wait_until(lambda: _from_sacct(job.job_id, run_command).nodes == "n[2-3],n1", "the accounting of both components")


def test_the_jobs_of_an_array_have_a_program_each_and_end_alone(cluster: Cluster, program: Program) -> None:
    command = program(WHO + "hosts = SlurmJob({'hosts': 1}).state().hosts\nprint(sys.argv[1], len(hosts))\n")
    spec = SlurmJob({"hosts": 1}, exclusive=False, slurm_args=["-w", "n2"], cpus_per_task=1, mem="100M")
    good, bad, also = spec.apply_array([[*command, "a"], "bash -c 'exit 4'", [*command, "c"]])
    assert not spec.active
    for task, code, said in ((good, 0, "a 1\n"), (bad, 4, ""), (also, 0, "c 1\n")):
        out = io.StringIO()
        assert (follow(task, out), out.getvalue()) == (code, said)
    wait_until(lambda: bad.status().phase is Phase.ENDED, "end of the second task")
    assert (bad.status().state, bad.status().exit_code) == ("FAILED", 4)


def test_one_job_of_an_array_can_be_cancelled(cluster: Cluster) -> None:
    first, second = SlurmJob({"hosts": 1}, exclusive=False, mem="100M").apply_array(["sleep 100", "sleep 100"])
    wait_until(lambda: first.status().phase is second.status().phase is Phase.RUNNING, "both tasks")
    first.kill()
    wait_until(lambda: first.status().phase is Phase.ENDED, "end of the first task")
    assert second.status().phase is Phase.RUNNING
    second.kill()


def test_a_job_waits_for_the_one_it_depends_on(cluster: Cluster, tmp_path: Path) -> None:
    first = SlurmJob({"hosts": 1}, exclusive=False, mem="100M")
    first.apply(f"bash -c 'while ! [ -e {tmp_path}/go ]; do sleep 0.1; done; touch {tmp_path}/done'")
    then = SlurmJob({"hosts": 1}, exclusive=False, mem="100M", dependency=f"afterok:{first.job_id}")
    then.apply(["ls", str(tmp_path / "done")])
    wait_until(lambda: then.status().reason == "Dependency", "the second job to wait")
    (tmp_path / "go").touch()
    assert follow(then, io.StringIO()) == 0


def test_a_node_that_fails_its_pre_flight_check_is_named(cluster: Cluster, program: Program) -> None:
    check = "[ $SLURMD_NODENAME != n2 ] || { echo 7 of 8 GPUs; exit 3; }"
    job = SlurmJob({"hosts": 2}, nodelist="n[1-2]", preflight=["true", check], env={"MARK": "here"})
    job.apply(program(WHO + "print(os.environ['MARK'], flush=True)\nSlurmJob({'hosts': 2}).state()\n"))
    out = io.StringIO()
    assert follow(job, out) == 1
    assert out.getvalue().startswith("here\n")
    assert "the agents of 1 of 2 hosts could not start" in out.getvalue()
    assert "pre-flight command" in out.getvalue()
    assert "7 of 8 GPUs" in out.getvalue()
