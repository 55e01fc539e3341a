"""The batch scripts of sbatch_templates on a real cluster, submitted by sbatch alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_nodes import ROOT, Cluster, read, wait_until
from slurm_programs import WHO

TEMPLATES = ROOT / "sbatch_templates"

PROGRAM = (
    WHO
    + """
import time
hosts = SlurmJob({"hosts": 1}).state().hosts
print(sys.argv[1:], *sorted(hosts.spawn_procs().spawn("who", Who).host.call().get().values()), flush=True)
while os.path.exists("wait") and not os.environ.get("SLURM_RESTART_COUNT"):
    time.sleep(0.1)
sys.exit(7)
"""
)


@pytest.fixture(autouse=True)
def _python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this Python as the ``python`` on PATH, as an activated environment has it."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def sbatch(cluster: Cluster, name: str, *options: str) -> tuple[str, Path]:
    """Submit a template with the program; return the job's id and the file of its output."""
    Path("train.py").write_text(PROGRAM)
    command = ["sbatch", "--parsable", *options, str(TEMPLATES / f"{name}.sbatch"), "train.py", "--lr", "1 2"]
    job = cluster.run(*command).strip()
    return job, Path(f"train-{job}.log")


def ended(cluster: Cluster, job: str, output: Path) -> None:
    """Wait for the end of a job whose program leaves with 7, and for nothing else to be the matter with it."""
    wait_until(lambda: not cluster.run("squeue", "-h", "-j", job).strip(), f"the end of job {job}: {read(output)}")
    assert "ExitCode=7:0" in cluster.run("scontrol", "show", "job", job), read(output)
    assert "Traceback" not in read(output)
    folder = Path("runs", job)
    assert (folder / "exit_code").read_text() == "7\n"
    assert (folder / "controller.log").resolve() == output.resolve()


@pytest.mark.parametrize("name", ["cpu", "mi300x", "mi300a", "mi355x"])
def test_sbatch_runs_a_program_on_all_nodes(cluster: Cluster, name: str) -> None:
    job, output = sbatch(cluster, name, "-w", "n[2-3]")
    ended(cluster, job, output)
    expected = [("n2", "n2", "0"), ("n3", "n3", "1")]
    assert f"['--lr', '1 2'] {expected[0]} {expected[1]}\n" in read(output)


def test_a_spare_is_not_used_by_the_program(cluster: Cluster) -> None:
    job, output = sbatch(cluster, "spares", "-w", "n[2-4]")
    ended(cluster, job, output)
    assert "['--lr', '1 2'] ('n2', 'n2', '0') ('n3', 'n3', '1')\n" in read(output)
    assert sorted(path.name for path in Path("runs", job, "logs").iterdir()) == ["n2.log", "n3.log", "n4.log"]


APPTAINER = """#!/bin/bash
# Stands for apptainer exec: says what it was asked for, and runs the command outside.
shift
while [[ $1 == --* ]]; do echo "option $1" >>apptainer.said; shift; done
echo "image $1" >>apptainer.said
shift
exec "$@"
"""


def test_program_and_agents_run_in_the_container(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = tmp_path / "commands"
    commands.mkdir()
    (commands / "apptainer").write_text(APPTAINER)
    (commands / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    job, output = sbatch(cluster, "container", "-w", "n[2-3]")
    ended(cluster, job, output)
    assert "['--lr', '1 2'] ('n2', 'n2', '0') ('n3', 'n3', '1')\n" in read(output)
    said = Path("apptainer.said").read_text()
    assert said.count("image image.sif") == 4  # to ask for torch, for the program, and for two agents
    assert f"option --bind={Path('runs', job).resolve()}\noption --rocm\n" in said


@pytest.mark.slow
def test_a_job_that_is_started_again_goes_on_in_its_folder(cluster: Cluster) -> None:
    Path("wait").touch()
    job, output = sbatch(cluster, "preemptible")
    wait_until(lambda: "['--lr', '1 2']" in read(output), f"the program: {read(output)}")
    folder = Path("runs", job).resolve()
    cluster.run("scontrol", "requeue", job)
    wait_until(lambda: read(output).count("['--lr', '1 2']") == 2, f"the second start: {read(output)}")
    ended(cluster, job, output)
    assert Path("runs", job).resolve() == folder
    assert "Restarts=1" in cluster.run("scontrol", "show", "job", job)


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.sbatch")))
def test_sbatch_takes_every_template(cluster: Cluster, name: str) -> None:
    fewer = ["--gpus-per-node=8"] if name == "mi300x-cpx" else []  # the nodes here have no 64
    subprocess.run(["sbatch", "--test-only", *fewer, str(TEMPLATES / f"{name}.sbatch"), "train.py"], check=True)


def test_a_job_without_a_program_says_so(cluster: Cluster) -> None:
    job = cluster.run("sbatch", "--parsable", str(TEMPLATES / "cpu.sbatch")).strip()
    output = Path(f"train-{job}.log")
    wait_until(lambda: "error: no program: say sbatch SCRIPT train.py ARGUMENTS\n" in read(output), "the message")
    wait_until(lambda: not cluster.run("squeue", "-h", "-j", job).strip(), "the end of the job")


def test_nodes_in_another_partition_mode_are_named(cluster: Cluster) -> None:
    job, output = sbatch(cluster, "mi300x-cpx", "--gpus-per-node=8", "-w", "n[2-3]")
    wait_until(lambda: not cluster.run("squeue", "-h", "-j", job).strip(), f"the end of job {job}")
    said = read(output)
    assert "host n2 has failed" in said
    assert "error: the agents of" in said
    assert "Traceback" not in said
    assert "partition mode of the GPUs" in said
