from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_slurm.job.folder import JobFolder
from monarch_slurm.job.processes import find_processes

DEADLINE = 30.0
TASK = "import sys; from monarch_slurm.job.task import run_task; run_task(sys.argv[1], sys.argv[2:] or None, None)"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE:g} s in vain for: {what}"
        time.sleep(0.02)


class Node:
    """Runs the task of one node of a pretended allocation."""

    def __init__(self, base: Path, node_id: int = 0) -> None:
        self.folder = JobFolder.create(base / "runs", "job")
        self.env = {
            **os.environ,
            "SLURM_JOB_ID": "12",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_NODEID": str(node_id),
            "SLURMD_NODENAME": f"n{node_id + 1}",
            "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
            "XDG_RUNTIME_DIR": str(base),
        }
        self.log = base / "task.log"

    def start(self, *program: str) -> subprocess.Popen[bytes]:
        with open(self.log, "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-c", TASK, str(self.folder.path), *program], env=self.env, stdout=log, stderr=log
            )

    def said(self, text: str) -> bool:
        path = self.folder.controller_log
        return path.exists() and text in path.read_text()

    def assert_gone(self) -> None:
        assert find_processes(self.folder.path) == set()
        assert not list(Path(self.env["XDG_RUNTIME_DIR"]).glob("ms-*"))


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("t", numbered=True)


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)])
def test_the_programs_exit_code_is_the_tasks_and_is_written_down(script: str, code: int, short: Path) -> None:
    node = Node(short)
    task = node.start("bash", "-c", f"echo $MONARCH_BATCH_JOB $MONARCH_SLURM_JOB_FOLDER; sleep 100 & {script}")
    assert task.wait(DEADLINE) == code, node.log.read_text()
    assert node.folder.exit_code() == code
    assert node.folder.controller_log.read_text() == f"1 {node.folder.path}\n"
    node.assert_gone()


def test_a_program_that_cannot_be_started_is_named(short: Path) -> None:
    node = Node(short)
    assert node.start("no-such-program").wait(DEADLINE) == 127
    assert node.folder.exit_code() == 127
    assert "cannot start no-such-program on n1: No such file" in node.folder.controller_log.read_text()
    node.assert_gone()


def test_the_notice_of_the_time_limit_asks_the_program_to_end(short: Path) -> None:
    node = Node(short)
    task = node.start("bash", "-c", "trap 'echo saving; exit 5' TERM; echo up; while :; do sleep 0.05; done")
    wait_until(lambda: node.said("up"), "the program")
    for pid in find_processes(node.folder.path):
        os.kill(pid, signal.SIGUSR2)  # as Slurm does: to all processes of the step
    task.send_signal(signal.SIGUSR2)
    assert task.wait(DEADLINE) == 5
    assert node.said("saving")
    node.assert_gone()


def test_a_task_that_is_killed_takes_its_program_along(short: Path) -> None:
    node = Node(short)
    task = node.start("bash", "-c", "echo up; exec sleep 100")
    wait_until(lambda: node.said("up"), "the program")
    task.kill()
    task.wait()
    wait_until(lambda: not find_processes(node.folder.path), "end of what the task started")


def test_other_nodes_end_when_the_program_has_ended(short: Path) -> None:
    node = Node(short, node_id=1)
    task = node.start("never started here")
    wait_until(lambda: bool(find_processes(node.folder.path)), "the agent")
    node.folder.write_exit_code(1)
    assert task.wait(DEADLINE) == 0
    node.assert_gone()


def test_sigterm_ends_a_node_at_once(short: Path) -> None:
    node = Node(short, node_id=1)
    task = node.start()
    wait_until(lambda: bool(find_processes(node.folder.path)), "the agent")
    task.terminate()
    assert task.wait(DEADLINE) == 0
    node.assert_gone()


def test_an_agent_that_fails_fails_its_task(short: Path) -> None:
    node = Node(short, node_id=1)
    node.env["MONARCH_SLURM_MESH_ORPHAN_TIMEOUT"] = "0.1"
    assert node.start().wait(DEADLINE) == 1
    assert "no controller published" in node.log.read_text()
    node.assert_gone()
