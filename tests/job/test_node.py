from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from pretended import DEADLINE, Pretended, wait_until

from monarch_slurm.host.agent import LEASE_EXPIRED
from monarch_slurm.interpreter import module_command, module_line
from monarch_slurm.wire import Invitation, write_invitation
from monarch_slurm.wire.keys import JobKeys

FakeSlurm = Callable[..., Path]


class Node(Pretended):
    """Runs the task of the second node of a pretended allocation."""

    def start(self, *options: str, step: str = "1") -> subprocess.Popen[bytes]:
        command = module_command("monarch_slurm.job.node", "--folder", str(self.folder.path), "--index", "1")
        env = {**self.env, "SLURMD_NODENAME": "n2", "SLURM_STEP_ID": step, **self.marker}
        with open(self.log, "ab") as log:
            return subprocess.Popen([*command, *options], env=env, stdout=log, stderr=log)

    def agents(self) -> set[int]:
        """Pids of the agent and its guardian."""
        return {pid for pid in self.processes() if "monarch_slurm.host" in _command_line(pid)}


def _command_line(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:  # or it has not been waited for
        return []


@pytest.fixture
def node(short: Path) -> Node:
    return Node(short)


def test_a_node_ends_when_the_program_has_ended(node: Node) -> None:
    task = node.start()
    wait_until(lambda: bool(node.agents()), "the agent")
    node.folder.write_exit_code(1)
    assert task.wait(DEADLINE) == 0
    node.assert_gone()


def test_pre_flight_commands_come_before_the_agent(node: Node) -> None:
    task = node.start("--preflight", "true", "--preflight", "echo 7 of 8 GPUs; exit 3")
    assert task.wait(DEADLINE) == 1
    assert "'echo 7 of 8 GPUs; exit 3' failed with exit code 3: 7 of 8 GPUs" in node.log.read_text()
    node.assert_gone()


def test_sigterm_ends_a_node_at_once(node: Node) -> None:
    task = node.start()
    wait_until(lambda: bool(node.agents()), "the agent")
    task.terminate()
    assert task.wait(DEADLINE) == 0
    node.assert_gone()


def test_an_agent_that_fails_fails_its_task(node: Node) -> None:
    node.env["MONARCH_SLURM_MESH_ORPHAN_TIMEOUT"] = "0.1"
    assert node.start().wait(DEADLINE) == 1
    assert "no controller published" in node.log.read_text()
    node.assert_gone()


def test_an_address_that_is_not_here_is_named(node: Node) -> None:
    assert node.start("--address=203.0.113.1").wait(DEADLINE) == 1
    assert "error: " in node.log.read_text()
    assert "has no address in '203.0.113.1'" in node.log.read_text()


def test_the_agent_sees_the_job_as_one_step_of_a_task_on_each_node(node: Node) -> None:
    node.env |= {
        "SLURM_NODEID": "0",
        "SLURM_CPUS_ON_NODE": "16",
        "MONARCH_SLURM_BATCH_VARIABLES": json.dumps({"SLURM_CPUS_ON_NODE": "1", "SLURM_GPUS": "16"}),
    }
    task = node.start()
    wait_until(lambda: bool(node.agents()), "the agent")
    env = psutil.Process(min(node.agents())).environ()
    assert (env["SLURM_NODEID"], env["SLURM_PROCID"]) == ("1", "1")
    assert (env["SLURM_NNODES"], env["SLURM_NTASKS"], env["SLURM_TASKS_PER_NODE"]) == ("2", "2", "1(x2)")
    assert (env["SLURM_CPUS_ON_NODE"], env["SLURM_GPUS"]) == ("16", "16")
    assert "MONARCH_SLURM_BATCH_VARIABLES" not in env
    task.terminate()
    assert task.wait(DEADLINE) == 0


@pytest.mark.parametrize("answers", [True, False])
def test_a_host_starts_again_only_when_the_controller_can_be_reached(
    node: Node, answers: bool, fake_slurm: FakeSlurm
) -> None:
    """Slurm says that the head is there, as it does for minutes after a loss; the one that listens never speaks."""
    fake_slurm(squeue=f"echo asked >> {node.log}.squeue; echo 'RUNNING|n1|n[1-2]'", sinfo="echo allocated")
    node.env |= {"PATH": os.environ["PATH"], "MONARCH_SLURM_MESH_ORPHAN_TIMEOUT": "1"}
    with socket.create_server(("127.0.0.1", 0)) as controller:
        address = f"tcp://127.0.0.1:{controller.getsockname()[1]}"
        keys = JobKeys.make()
        invitation = Invitation(address, keys.server_public, keys.agent_public, keys.agent_secret)
        write_invitation(node.folder.path, invitation)
        if not answers:
            controller.close()
        task = node.start("--index", "0")  # the host that may dial an address of its own
        if answers:
            assert task.wait(DEADLINE) == LEASE_EXPIRED
        else:
            asked = Path(f"{node.log}.squeue")
            wait_until(lambda: asked.exists() and len(asked.read_text().split()) == 2, "two questions to Slurm")
            assert task.poll() is None
            task.terminate()
            assert task.wait(DEADLINE) == 0
    node.assert_gone()


def test_a_second_task_watches_the_first_and_starts_an_agent_after_it(node: Node) -> None:
    first = node.start(step="1")
    wait_until(lambda: bool(node.agents()), "the agent")
    agents = node.agents()
    second = node.start(step="2")
    wait_until(lambda: "watching the task" in node.log.read_text(), "the second task to find the first")
    assert node.agents() == agents
    first.kill()
    first.wait()
    wait_until(lambda: bool(node.agents()) and not node.agents() & agents, "another agent")
    second.terminate()
    assert second.wait(DEADLINE) == 0
    wait_until(lambda: not node.agents(), "end of the agents")


def test_a_second_task_that_is_told_to_end_ends_the_first(node: Node) -> None:
    first = node.start(step="1")
    wait_until(lambda: bool(node.agents()), "the agent")
    second = node.start(step="2")
    wait_until(lambda: "watching the task" in node.log.read_text(), "the second task to find the first")
    second.terminate()
    assert second.wait(DEADLINE) == 0
    assert first.wait(DEADLINE) == 0
    node.assert_gone()


def test_slurm_is_told_when_slurmstepd_is_gone(node: Node, fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    fake_slurm(scancel=f"echo $@ > {tmp_path / 'cancelled'}")
    node.env["PATH"] = os.environ["PATH"]
    module = "monarch_slurm.job.node"
    words = module_line(sys.executable, module, "--folder", str(node.folder.path), "--index", "1")
    step = f"{words} >&2 & echo $!; read _"
    env = {**node.env, "SLURMD_NODENAME": "n2", "SLURM_STEP_ID": "1", **node.marker}
    with open(node.log, "ab") as log:
        slurmstepd = subprocess.Popen(
            ["bash", "-c", step], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
    assert slurmstepd.stdout is not None
    task = psutil.Process(int(slurmstepd.stdout.readline()))
    wait_until(lambda: bool(node.agents()), "the agent")
    agents = node.agents()
    slurmstepd.kill()
    slurmstepd.communicate()
    wait_until((tmp_path / "cancelled").exists, "the call of scancel")
    wait_until(lambda: (tmp_path / "cancelled").read_text() == "12.1\n", "its argument")
    assert node.agents() == agents
    task.terminate()
    wait_until(lambda: not node.processes(), "the end of the task")
