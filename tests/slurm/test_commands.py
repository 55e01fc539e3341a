"""The commands of monarch-slurm about jobs, as a person types them on a login node of a real cluster."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slurm_nodes import Cluster, read, wait_until
from slurm_programs import SURVIVES
from terminal import PROMPT, Terminal

Program = Callable[[str], list[str]]
COMMAND = [sys.executable, "-m", "monarch_slurm"]


def call(*arguments: str, code: int = 0) -> str:
    """Run monarch-slurm; return what it printed, and its errors if it fails as expected."""
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr if code else done.stdout


def phase(job: str) -> str:
    told = json.loads(call("status", job, "--json"))
    return str(told["slurm"]["phase"])


@pytest.fixture
def job(cluster: Cluster, program: Program) -> dict[str, Any]:
    """A job of four nodes whose program goes on until there is a file named ``stop``."""
    logs = f"MONARCH_SLURM_LOG_DIR={Path.cwd() / 'of procs'}"
    told = json.loads(call("submit", "--nodes", "4", "--json", "-J", "night run", "--env", logs, *program(SURVIVES)))
    wait_until(lambda: "answering: n1 n2 n3 n4" in read(Path(told["folder"], "controller.log")), "the program")
    return {"id": str(told["job_id"]), "folder": Path(told["folder"])}


def test_a_job_is_seen_read_and_cancelled(cluster: Cluster, job: dict[str, Any]) -> None:
    (listed,) = json.loads(call("status", "--json"))
    assert (listed["job_id"], listed["name"], listed["nodes"]) == (job["id"], "night run", "n[1-4]")
    assert job["id"] in call("status")

    told = json.loads(call("status", job["id"], "--json"))
    assert (told["folder"], told["exit_code"], told["slurm"]["state"]) == (str(job["folder"]), None, "RUNNING")
    hosts = {host["name"]: host for host in told["census"]["hosts"]}
    assert {name for name, host in hosts.items() if host["state"] == "up"} >= set(cluster.nodes)
    assert [actor["class"] for actor in hosts["n2"]["procs"][0]["actors"]] == ["__main__.Who"]
    text = call("status", str(job["folder"]))
    assert f"job {job['id']} is RUNNING on n[1-4]" in text

    assert call("logs", job["id"]) == "ready\nanswering: n1 n2 n3 n4\n"
    assert call("logs", job["id"], "-n", "1") == "answering: n1 n2 n3 n4\n"
    assert re.fullmatch(r"\[n3 \w+-\w+ 2\] an actor on n3\n", call("logs", job["id"], "--rank", "2"))
    assert "n7; there are: n1, n2, n3, n4" in call("logs", job["id"], "--host", "n7", code=2)

    assert call("cancel", job["id"]) == f"cancelled job {job['id']}\n"
    wait_until(lambda: phase(job["id"]) == "ended", "the end of the job")
    assert f"job {job['id']} is CANCELLED" in call("cancel", job["id"], code=1)
    assert f"job {job['id']} is CANCELLED" in call("attach", job["id"], code=1)
    assert call("logs", "-f", job["id"]).startswith("ready\n")


def test_a_second_terminal_watches_a_job(job: dict[str, Any]) -> None:
    with subprocess.Popen([*COMMAND, "logs", "-f", job["id"]], stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == "ready\n"
        terminal = Terminal(*COMMAND, "attach", job["id"])
        try:
            terminal.expect(rf"job {job['id']} is RUNNING on n\[1-4\]")
            terminal.expect("n4 .*up")
            terminal.interrupt()
            terminal.expect("interrupted")
        finally:
            terminal.close()
        assert phase(job["id"]) == "running"
        Path("stop").touch()
        assert follower.wait(60) == 0
        assert follower.stdout.read() == "answering: n1 n2 n3 n4\n"


def test_what_is_submitted_can_be_followed_and_seen_before(cluster: Cluster) -> None:
    dry = call("submit", "--nodes", "2", "--dry-run", "-w", "n[3-4]", "bash", "-c", "hostname; exit 5")
    assert "#SBATCH --nodelist='n[3-4]'\n" in dry
    assert "# on the head node: bash -c 'hostname; exit 5'\n" in dry
    assert not Path("runs").exists()
    command = [*COMMAND, "submit", "-f", "--mesh", "a=1", "--mesh", "b=1", "--setup", "export X=1", "-w", "n[3-4]"]
    done = subprocess.run([*command, "bash", "-c", "hostname; exit 5"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (5, "n3\n"), done.stderr
    assert "its program ended with exit code 5; its files are in " in done.stderr
    assert "invalid partition specified: nope" in call("submit", "-p", "nope", "--nodes", "1", "true", code=1)


def test_jobs_that_are_not_ours(cluster: Cluster) -> None:
    other = cluster.run("sbatch", "--parsable", "--hold", "--wrap", "true").strip()
    for command in ("status", "logs", "cancel", "attach"):
        assert f"error: job {other} (wrap) was not started by monarch_slurm" in call(command, other, code=1)
        assert "error: Slurm knows no job 4000000" in call(command, "4000000", code=1)
    assert call("status").startswith("no job of yours is in the queue\n")
    cluster.run("scancel", other)


def test_a_prompt_inside_of_salloc_has_the_nodes(cluster: Cluster) -> None:
    terminal = Terminal("salloc", "-N2", "--exclusive", "bash", "--norc", "--noprofile", "-i")
    try:
        terminal.expect(PROMPT)
        terminal.type(f"{' '.join(COMMAND)} shell --plain")
        terminal.expect(r"hosts: a HostMesh of 2 nodes of job \d+: n\[1-2\](.|\n)*>>> ")
        terminal.type("class Who(Actor):")
        terminal.expect(r"\.\.\. ")
        terminal.type("    @endpoint")
        terminal.type("    def host(self): import socket; return socket.gethostname()")
        terminal.type("")
        terminal.expect(">>> ")
        terminal.type("who = hosts.spawn_procs().spawn('who', Who); print('at', *who.host.call().get().values())")
        terminal.expect("\nat n1 n2\n")
        terminal.type("exit()")
        terminal.expect(PROMPT)
        terminal.type("squeue -s -h | wc -l; echo over")
        terminal.expect("over\n")
    finally:
        terminal.close()
    wait_until(lambda: not cluster.run("squeue", "-h").strip(), "the end of the allocation")


def test_a_prompt_of_ipython_has_the_nodes(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    monkeypatch.setenv("IPY_TEST_SIMPLE_PROMPT", "1")  # or it would draw its lines again and again
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    terminal = Terminal("salloc", "-N2", "--exclusive", *COMMAND, "shell")
    try:
        terminal.expect(r"hosts: a HostMesh of 2 nodes of job \d+: n\[1-2\](.|\n)*In \[1\]: ")
        terminal.type("%cpaste -q")
        terminal.type("class Who(Actor):")
        terminal.type("    @endpoint")
        terminal.type("    def host(self): import socket; return socket.gethostname()")
        terminal.type("    @endpoint")
        terminal.type("    def die(self): import os; os.kill(os.getpid(), 9)")
        terminal.type("--")
        terminal.expect(r"--\n(.|\n)*In \[\d+\]: ")
        terminal.type("who = hosts.spawn_procs().spawn('who', Who); print('at', *who.host.call().get().values())")
        terminal.expect(r"\nat n1 n2\n(.|\n)*In \[\d+\]: ")
        terminal.type("who.slice(hosts=1).die.broadcast()")
        terminal.expect("nobody handled this failure:\n")
        terminal.type("print('here:', await who.slice(hosts=0).host.call_one())")
        terminal.expect(r"\nhere: n1\n(.|\n)*In \[\d+\]: ")
        terminal.type("exit")
        terminal.expect("Relinquishing job allocation")
    finally:
        terminal.close()


def test_a_shell_outside_of_a_job_says_so(cluster: Cluster) -> None:
    said = call("shell", code=1)
    assert said.startswith("error: this shell is not inside a Slurm job: start one with salloc")
    assert "--job ID" in said
