"""Programs at a prompt inside of salloc: whatever becomes of them, the allocation stays and nothing else does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_nodes import Cluster, wait_until
from terminal import PROMPT, Terminal

PYTHON = f"{sys.executable} -q"

DEFINE = """
import os, socket
from monarch_slurm.actor import Actor, endpoint, this_host
from monarch_slurm.job import SlurmAllocation

class Who(Actor):
    @endpoint
    def host(self): return socket.gethostname()
    @endpoint
    def fail(self): raise ValueError("a typo")
    @endpoint
    def wait(self): import time; time.sleep(100)
    @endpoint
    def die(self): os.kill(os.getpid(), 9)

hosts = SlurmAllocation.from_env().hosts()
procs = hosts.spawn_procs()
who = procs.spawn("who", Who)
print("answering:", *who.host.call().get().values(), flush=True)
"""


@pytest.fixture
def shell(cluster: Cluster, tmp_path: Path) -> Iterator[Terminal]:
    """A shell that holds three nodes."""
    (tmp_path / "define.py").write_text(DEFINE)
    terminal = Terminal("salloc", "-N3", "--exclusive", "bash", "--norc", "--noprofile", "-i")
    try:
        terminal.expect(PROMPT)
        yield terminal
    finally:
        terminal.close()


def start(shell: Terminal) -> int:
    """Start Python in the shell, have it take the nodes, and return its pid."""
    shell.type(PYTHON)
    shell.expect(">>> ")
    shell.type("exec(open('define.py').read())")
    shell.expect("answering: n1 n2 n3\n>>> ")
    shell.type("print('pid', os.getpid())")
    return int(shell.expect(r"\npid (\d+)\n>>> ").group(1))


def job_of(cluster: Cluster) -> str:
    return cluster.run("squeue", "-h", "-o", "%i").strip()


def nothing_runs(cluster: Cluster, tmp_path: Path) -> None:
    """Wait until there is no process of ours on any machine, nor a step of Slurm."""
    for node in cluster.nodes:
        wait_until(lambda node=node: not cluster.processes(node), f"nothing of ours to be left on {node}")
    wait_until(lambda: not cluster.run("squeue", "-s", "-h").strip(), "all steps to end")
    here = ["pgrep", "-f", f"monarch_slurm.job.session --folder={tmp_path}"]
    wait_until(lambda: subprocess.run(here, capture_output=True).returncode == 1, "the supervisor to end")
    assert not list((tmp_path / "runs").glob(".session-*"))


@pytest.mark.parametrize("how", ["leave", "kill"])
def test_leaving_the_prompt_leaves_the_allocation_and_nothing_else(
    cluster: Cluster, shell: Terminal, tmp_path: Path, how: str
) -> None:
    for _ in range(2):  # a second program finds everything as the first did
        pid = start(shell)
        if how == "leave":
            shell.type("exit()")
        else:
            os.kill(pid, signal.SIGKILL)
        shell.expect(PROMPT)
    nothing_runs(cluster, tmp_path)
    shell.type("srun -N3 hostname | sort; echo")
    shell.expect("n1\nn2\nn3\n")


def test_failures_and_ctrl_c_cost_nothing(cluster: Cluster, shell: Terminal) -> None:
    start(shell)
    steps = cluster.run("squeue", "-s", "-h", "-o", "%i")
    shell.type("who.slice(hosts=0).fail.call_one().get()")
    shell.expect("a typo(.|\n)*>>> ")
    shell.type("who.wait.call().get()")
    shell.expect("get\\(\\)\n")
    wait_until(lambda: shell.interrupt() or "KeyboardInterrupt" in _grown(shell), "the call to be interrupted")
    shell.expect(">>> ")
    shell.type("who = hosts.spawn_procs().spawn('who', Who); print('again:', *who.host.call().get().values())")
    shell.expect("\nagain: n1 n2 n3\n")
    shell.type("who.slice(hosts=1).die.broadcast()")
    shell.expect("nobody handled this failure:\n.*Killed\\(sig=9\\) \\(host n2, ")
    shell.type("print('here:', who.slice(hosts=0).host.call_one().get())")
    shell.expect("\nhere: n1\n")
    shell.type("hosts == SlurmAllocation.from_env().hosts()")
    shell.expect("\nTrue\n")
    assert cluster.run("squeue", "-s", "-h", "-o", "%i") == steps


def _grown(shell: Terminal) -> str:
    """What the terminal has printed since the last match, after a short wait for more."""
    try:
        shell.expect("KeyboardInterrupt", 0.3)
    except AssertionError:
        return ""
    return "KeyboardInterrupt"


def test_a_second_program_is_refused_or_takes_the_nodes_over(cluster: Cluster, shell: Terminal, tmp_path: Path) -> None:
    pid = start(shell)
    job = job_of(cluster)
    second = Terminal("env", f"SLURM_JOB_ID={job}", *PYTHON.split())
    try:
        second.expect(">>> ")
        second.type(f"from monarch_slurm.job import SlurmAllocation; a = SlurmAllocation.from_job({job})")
        second.type(f"hosts = a.hosts(log_dir='{tmp_path}/runs')")
        second.expect(rf"HostsTakenError: .*serve another program \(pid {pid} on ")
        second.type(f"hosts = a.hosts(log_dir='{tmp_path}/runs', take_over=True); print('taken', len(hosts))")
        second.expect("\ntaken 3\n")
        shell.type("who.host.call().get(timeout=30)")
        shell.expect("SupervisionError")
        shell.type("exit()")
        shell.expect(PROMPT)
        second.type("exit()")
        wait_until(lambda: not cluster.run("squeue", "-s", "-h").strip(), "all steps to end")
    finally:
        second.close()


def test_a_step_that_holds_the_nodes_is_no_obstacle(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "define.py").write_text(DEFINE)
    inside = Terminal("salloc", "-N3", "--exclusive", "srun", "-N1", "--pty", *PYTHON.split())
    try:
        inside.expect(">>> ")
        inside.type("exec(open('define.py').read())")
        inside.expect("answering: n1 n2 n3\n>>> ")
        inside.type("exit()")
        inside.expect("Relinquishing job allocation")
    finally:
        inside.close()
