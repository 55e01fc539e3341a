from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_nodes import Cluster, wait_until
from slurm_programs import WHO

from monarch_slurm.job import (
    Container,
    JobEndedError,
    JobError,
    JobFolderError,
    JobStartTimeoutError,
    Phase,
    SlurmJob,
    SubmitError,
    follow,
)
from monarch_slurm.job.slurm_options import KEYWORDS, REFUSED_BY_SBATCH

Program = Callable[[str], list[str]]


def run(job: SlurmJob, script: list[str] | str) -> tuple[int, str]:
    job.apply(script)
    out = io.StringIO()
    return follow(job, out), out.getvalue()


@pytest.mark.parametrize("code", [0, 7])
def test_the_jobs_exit_code_is_the_programs(cluster: Cluster, code: int) -> None:
    job = SlurmJob({"hosts": 4})
    assert run(job, ["bash", "-c", f"hostname; exit {code}"]) == (code, "n1\n")
    wait_until(lambda: job.status().phase is Phase.ENDED, "end of the job")
    status = job.status()
    assert status.exit_code == code
    assert status.state == ("COMPLETED" if code == 0 else "FAILED")


def test_a_folder_with_blanks_and_quotes_and_all_options_are_taken(cluster: Cluster, tmp_path: Path) -> None:
    job = SlurmJob(
        {"hosts": 2},
        slurm_args=["--comment=two words", "-w", "n[3-4]"],
        job_name="night run",
        ntasks_per_node=2,
        cpus_per_task=3,
        gpus_per_node=2,
        mem="1G",
        time_limit="5",
        partition="debug",
        log_dir=str(tmp_path / "it's here"),
        exclusive=False,
        setup=["export MARK='set up'"],
    )
    begun = 'until [ -e "$MONARCH_SLURM_JOB_FOLDER/logs/n4.log" ]; do sleep 0.1; done'
    script = f"{begun}; hostname; echo $MARK $SLURM_CPUS_PER_TASK $CUDA_VISIBLE_DEVICES"
    code, out = run(job, ["bash", "-c", script])
    assert (code, out) == (0, "n3\nset up 6 0,1\n")
    assert "Comment=two words" in cluster.run("scontrol", "show", "job", str(job.job_id))
    assert {path.name for path in (job.folder / "logs").iterdir()} == {"n3.log", "n4.log"}


def test_a_job_submitted_from_inside_of_a_job_is_not_shaped_by_it(cluster: Cluster, program: Program) -> None:
    command = program(
        "import sys\n"
        "from monarch_slurm.job import SlurmJob, follow\n"
        "job = SlurmJob({'hosts': 1}, exclusive=False, slurm_args=['-w', 'n2'])\n"
        "job.apply(['bash', '-c', 'env | grep -E ^SLURM_\\\\|^SRUN_'])\n"
        "sys.exit(follow(job, sys.stdout))\n"
    )
    outer = ["srun", "-N1", "-w", "n1", "--mem=100M", "--cpus-per-task=3", "--time=7", *command]
    inner = dict(line.split("=", 1) for line in cluster.run(*outer).splitlines())
    assert inner["SLURMD_NODENAME" if "SLURMD_NODENAME" in inner else "SLURM_JOB_NODELIST"] == "n2"
    assert not {"SLURM_CPUS_PER_TASK", "SLURM_MEM_PER_NODE", "SRUN_CPUS_PER_TASK"} & set(inner)


SAVES = """
import signal, sys

def save(*_):
    print("saved", flush=True)
    sys.exit(9)

signal.signal(signal.SIGTERM, save)
print("up", flush=True)
while True:
    signal.pause()
"""


def test_cancelling_ends_everything(cluster: Cluster, program: Program) -> None:
    job = SlurmJob({"hosts": 4})
    job.apply(program(SAVES))
    log = job.folder / "controller.log"
    wait_until(lambda: log.exists() and "up" in log.read_text(), "the program")
    job.kill()
    wait_until(lambda: job.status().phase is Phase.ENDED, "end of the job")
    assert job.status().state == "CANCELLED"
    assert log.read_text() == "up\nsaved\n"
    assert follow(job, io.StringIO()) == 9


def test_a_job_cancelled_in_the_queue_is_told(cluster: Cluster) -> None:
    job = SlurmJob({"hosts": 1}, slurm_args=["--hold"])
    job.apply("true")
    job.kill()
    with pytest.raises(JobEndedError, match=f"job {job.job_id} is CANCELLED"):
        follow(job, io.StringIO())


@pytest.mark.slow
def test_the_time_limit_is_announced_to_the_program(cluster: Cluster, program: Program) -> None:
    job = SlurmJob({"hosts": 2}, time_limit="1")
    assert run(job, program(SAVES)) == (9, "up\nsaved\n")


def test_a_partition_that_is_not_there(cluster: Cluster) -> None:
    with pytest.raises(SubmitError, match=r"invalid partition specified: nope.*debug\* \(4 nodes\)"):
        SlurmJob({"hosts": 1}, partition="nope").apply("true")


def test_more_nodes_than_there_are(cluster: Cluster) -> None:
    with pytest.raises(SubmitError, match=r"5 nodes asked for, more than partition debug has; .*debug\* \(4 nodes\)"):
        SlurmJob({"hosts": 5}).apply("true")


def test_more_gpus_than_a_node_has(cluster: Cluster) -> None:
    with pytest.raises(SubmitError, match=r"Requested node configuration is not available.*: 1 node with 9 GPUs each"):
        SlurmJob({"hosts": 1}, gpus_per_node=9).apply("true")
    with pytest.raises(SubmitError, match=r"Requested node configuration is not available.*: 1 node, --gres=gpu:9"):
        SlurmJob({"hosts": 1}, gres="gpu:9").apply("true")


def test_an_option_that_sbatch_does_not_know(cluster: Cluster) -> None:
    with pytest.raises(SubmitError, match="unrecognized option '--frob'"):
        SlurmJob({"hosts": 1}, slurm_args=["--frob"]).apply("true")


def test_a_folder_that_nodes_do_not_share(cluster: Cluster) -> None:
    folder = Path("/dev/shm") / f"ms-test-{os.getpid()}"  # each node has a /dev/shm of its own
    try:
        job = SlurmJob({"hosts": 1}, log_dir=str(folder))
        job.apply("true")
        with pytest.raises(JobFolderError, match="file system that all nodes share"):
            follow(job, io.StringIO())
    finally:
        subprocess.run(["rm", "-r", str(folder)], check=True)


def test_python_that_is_not_there(cluster: Cluster) -> None:
    job = SlurmJob({"hosts": 2}, python_exe="/no/such/python")
    job.apply("true")
    with pytest.raises(JobEndedError, match="No such file or directory"):
        follow(job, io.StringIO())


def test_a_package_that_cannot_be_imported(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path.endswith("site-packages")))
    # Without site, Python does not see a package that is installed to be edited in place.
    job = SlurmJob({"hosts": 2}, python_exe=f"{sys.executable} -S", setup=["export PYTHONSAFEPATH=1"])
    job.apply("true")
    with pytest.raises(JobEndedError, match=r"last lines of batch\.log:(.|\n)*No module named 'monarch_slurm'"):
        follow(job, io.StringIO())


def test_waiting_in_the_queue_can_be_limited(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    job = SlurmJob({"hosts": 1}, slurm_args=["--hold"], job_start_timeout=1)
    with pytest.raises(JobStartTimeoutError, match=r"JobHeldUser.*stays in the queue"):
        job.state(None)
    assert "the job is held" in capsys.readouterr().err
    assert job.status().state == "PENDING"
    job.kill()


def test_a_job_that_was_not_submitted_has_no_number() -> None:
    with pytest.raises(JobError, match="call apply"):
        _ = SlurmJob({"hosts": 1}).job_id


REACH_SBATCH = {
    "acctg-freq", "bb", "bbf", "begin", "cluster-constraint", "container", "contiguous", "core-spec",
    "cores-per-socket", "cpu-freq", "cpus-per-gpu", "deadline", "delay-boot", "distribution", "extra-node-info",
    "get-user-env", "gid", "gpu-bind", "gpu-freq", "gpus", "gpus-per-socket", "gpus-per-task", "gres-flags", "hold",
    "ignore-pbs", "licenses", "mail-type", "mail-user", "mcs-label", "mem-per-cpu", "mem-per-gpu", "mincpus",
    "nice", "overcommit", "oversubscribe", "power", "priority", "profile", "propagate", "reboot",
    "sockets-per-node", "spread-job", "switches", "thread-spec", "threads-per-core", "time-min", "tmp", "uid",
    "use-min-nodes", "verbose", "wckey",
}  # fmt: skip
"""Options that change nothing that this package depends on."""


def test_each_option_of_this_sbatch_is_refused_or_a_keyword_or_known_to_do_no_harm(cluster: Cluster) -> None:
    there = set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)", cluster.run("sbatch", "--help")))
    assert {"array", "signal", "time"} <= there
    known = REFUSED_BY_SBATCH.keys() | KEYWORDS.keys() | REACH_SBATCH
    assert there - known == set()
    assert REACH_SBATCH & (REFUSED_BY_SBATCH.keys() | KEYWORDS.keys()) == set()


PYXIS = """#!/bin/bash
# Stands for srun with Pyxis: what is on PATH inside of the image is not there outside, where srun looks for commands.
inside=$(dirname "$0")/inside
arguments=()
for argument; do
    case $argument in
    --container-*) echo "$argument" >>"$(dirname "$0")/asked" ;;
    /bin/sh) arguments+=(env "PATH=$inside:$PATH" "$argument") ;;
    *) arguments+=("$argument") ;;
    esac
done
exec REAL "${arguments[@]}"
"""


def test_pyxis_where_srun_looks_for_the_command_outside(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "test_exec" in cluster.run("scontrol", "show", "config")
    refused = subprocess.run(["srun", "python-inside", "-V"], capture_output=True, text=True, check=False)
    assert "Can not execute python-inside" in refused.stderr
    commands = tmp_path / "commands"
    (commands / "inside").mkdir(parents=True)
    (commands / "srun").write_text(PYXIS.replace("REAL", str(shutil.which("srun"))))
    (commands / "inside" / "python-inside").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for path in (commands / "srun", commands / "inside" / "python-inside"):
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    program = tmp_path / "program.py"
    program.write_text(
        WHO + "from monarch_slurm.job import job_load\nhosts = job_load().state().hosts\n"
        "print(sys.argv[1], *sorted(hosts.spawn_procs().spawn('who', Who).host.call().get().values()), flush=True)\n"
    )
    job = SlurmJob({"hosts": 2}, nodelist="n[2-3]", container=Container("image.sqsh", python="python-inside"))
    code, out = run(job, [str(program), "two words"])
    assert (code, out.splitlines()[-1]) == (0, "two words ('n2', 'n2', '0') ('n3', 'n3', '1')")
    asked = (commands / "asked").read_text()
    assert asked.count("--container-image=image.sqsh\n") == 3  # for the program, and for two agents
