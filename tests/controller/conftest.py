"""Real host agents, started from a job folder as the job layer starts them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support import DEADLINE, REPOSITORY, wait_gone

import monarch_slurm.actor as public
from monarch_slurm.actor import MeshFailure


class Agent:
    """An agent of its own process."""

    def __init__(self, folder: Path, name: str, log: Path, env: dict[str, str]) -> None:
        self.log = log
        command = [sys.executable, "-m", "monarch_slurm.host", "--folder", str(folder), "--name", name]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **env}
        with open(log, "ab") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    @property
    def pid(self) -> int:
        """The agent itself; ``process`` is its guardian."""
        (child,) = psutil.Process(self.process.pid).children()
        return child.pid

    def family(self) -> list[int]:
        return [self.process.pid, *(child.pid for child in psutil.Process(self.process.pid).children(recursive=True))]

    def wait(self) -> int:
        return self.process.wait(DEADLINE)

    def text(self) -> str:
        return self.log.read_text()


@pytest.fixture(scope="session", autouse=True)
def _hook_for_late_failures() -> None:
    """Agents end after their test, and what the client hears of that must not end pytest."""
    public.unhandled_fault_hook = lambda failure: None


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    started: list[Agent] = []

    def start(folder: Path, name: str, env: dict[str, str] | None = None) -> Agent:
        started.append(Agent(folder, name, tmp_path / f"{name}-{len(started)}.log", env or {}))
        return started[-1]

    yield start
    for agent in started:
        if agent.process.poll() is None:
            family = agent.family()
            agent.process.terminate()
            agent.wait()
            wait_gone(*family[1:])


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[MeshFailure]:
    seen: list[MeshFailure] = []
    lock = threading.Lock()

    def hook(failure: MeshFailure) -> None:
        with lock:
            seen.append(failure)

    monkeypatch.setattr(public, "unhandled_fault_hook", hook)
    return seen
