"""The nodes of the test cluster, and what can be done to them."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "slurm_cluster.sh"
DEADLINE = 90.0


def wait_until(condition: Callable[[], object], what: str, seconds: float = DEADLINE) -> None:
    """Return when ``condition`` holds; fail when it does not within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain for: {what}"
        time.sleep(0.05)


def read(path: Path) -> str:
    """What is in a file that may not be there yet."""
    return path.read_text() if path.exists() else ""


class Cluster:
    """Four nodes, n1 to n4, and what can be done to them."""

    nodes = ("n1", "n2", "n3", "n4")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "SLURM_LOCAL_DIR": str(folder)}
        self.hurt: set[str] = set()
        self.losses = 0

    def call(self, *arguments: str) -> str:
        """Run tests/slurm_cluster.sh; return its output."""
        done = subprocess.run(["bash", str(SCRIPT), *arguments], env=self.env, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.fail(f"slurm_cluster.sh {' '.join(arguments)}: {done.stderr}\n{done.stdout}", pytrace=False)
        return done.stdout

    def cut(self, node: str) -> None:
        """Unplug the network of ``node``; its processes live on."""
        self.hurt.add(node)
        self.losses += 1
        self.call("cut", node)

    def kill(self, node: str) -> None:
        """Take the power of ``node``."""
        self.hurt.add(node)
        self.losses += 1
        self.call("kill", node)

    def heal(self, *nodes: str) -> None:
        """Bring nodes back: those named, or all that a test has hurt."""
        for node in nodes or sorted(self.hurt):
            self.call("heal", node)
        self.hurt -= set(nodes or self.hurt)

    def run(self, *command: str) -> str:
        """Run a command of Slurm; return its output."""
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def processes(self, node: str) -> dict[int, str]:
        """Return the command lines of what is ours in ``node``, by pid as seen from here."""
        found = {}
        for pid in self.call("pids", node).split():
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # it ended meanwhile
            if "monarch" in line or "submitit" in line or "slurmstepd" in line:
                found[int(pid)] = line
        return found

    def agents(self, node: str) -> set[int]:
        """Return the pids of host agents and their guardians in ``node``."""
        return {pid for pid, line in self.processes(node).items() if "monarch_slurm.host " in line}

    def is_idle(self) -> bool:
        """Return whether no node has a job or a problem."""
        states = self.run("sinfo", "-h", "-N", "-p", "debug", "-o", "%T").split()
        return states == ["idle"] * len(self.nodes) and not self.run("squeue", "-h").strip()
