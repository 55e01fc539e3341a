"""What an agent does with what it inherits before it serves anybody."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from job_agents import Agent
from support import DEADLINE, REPOSITORY, descendants, wait_until

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a PID namespace")


@root_only
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_agent_that_is_process_one_ends_while_it_waits_for_a_controller(
    agents: Callable[..., Agent], tmp_path: Path, number: int
) -> None:
    agent = agents(tmp_path, "n1", within=["unshare", "--pid", "--fork", "--mount-proc"])
    first = wait_until(lambda: descendants(agent.process.pid), "process 1 runs")[0]
    mask = 1 << (number - 1)

    def handles() -> bool:
        status = Path(f"/proc/{first}/status").read_text()
        return bool(int(status.partition("SigCgt:")[2].split()[0], 16) & mask)

    wait_until(handles, "it has a handler")
    os.kill(first, number)
    assert agent.wait() == 128 + number
    assert "Traceback" not in agent.text()


@root_only
def test_proc_of_another_pid_namespace_is_refused(agents: Callable[..., Agent], tmp_path: Path) -> None:
    agent = agents(tmp_path, "n1", within=["unshare", "--pid", "--fork"])
    assert agent.wait() == 1
    assert agent.text().startswith("error: /proc does not show this process (pid 1; /proc/self is ")
    assert "--mount-proc" in agent.text()


@pytest.mark.parametrize("fds", [fds for n in range(4) for fds in itertools.combinations("012", n)])
def test_an_agent_without_standard_descriptors_says_why_it_ends(tmp_path: Path, fds: tuple[str, ...]) -> None:
    """It finds no controller; where it has a stderr, it says so there, and nowhere a traceback."""
    output = tmp_path / "output"
    close = "import os, sys\nfor fd in sys.argv[1]: os.close(int(fd))\nos.execv(sys.executable, sys.argv[2:])"
    agent = [sys.executable, "-m", "monarch_slurm.host", "--folder", str(tmp_path), "--name", "n1"]
    with open(output, "wb") as file:
        ended = subprocess.run(
            [sys.executable, "-c", close, "".join(fds), *agent],
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False, timeout=DEADLINE,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "MONARCH_SLURM_MESH_ORPHAN_TIMEOUT": "0.1"},
        )  # fmt: skip
    assert ended.returncode == 1
    assert "Traceback" not in output.read_text()
    assert output.read_text().startswith("error: host n1: no controller published") is ("2" not in fds)
