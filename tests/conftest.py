"""What all tests share. Native modules are compiled with warnings as errors."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import hypothesis
import pytest
from job_agents import Agent
from support import Program, wait_gone

import monarch_slurm.actor as public
from monarch_slurm.actor import MeshFailure

os.environ["MONARCH_SLURM_NATIVE_STRICT"] = "1"
# Records of this process have no prefix, whichever test was first to use the client.
public.config.prefix_python_logs_with_actor = False
# What else runs on this machine is no test's business. Short, for sockets.
os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="mt-", dir="/tmp")
# A script that runs this in the background has it ignore Ctrl-C, and with it the programs whose Ctrl-C is tested.
signal.signal(signal.SIGINT, signal.default_int_handler)
# How long an example takes depends on what else runs.
hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update", action="store_true", help="renew the recorded files that generated text is compared with"
    )


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)


@pytest.fixture(autouse=True)
def _no_variable_is_left() -> Iterator[None]:
    """Nothing that a test calls may set variables of this process, which later tests would be shaped by."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    for name in names:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    ours = [name for name in names if name.startswith(("MONARCH_", "SLURM_", "SBATCH_"))]
    assert not ours, f"left in the environment: {', '.join(ours)}"


@pytest.fixture(scope="session")
def _hook_for_late_failures() -> None:
    """Agents end after their test, and what the client hears of that must not end pytest."""
    public.unhandled_fault_hook = lambda failure: None


@pytest.fixture
def agents(tmp_path: Path, _hook_for_late_failures: None) -> Iterator[Callable[..., Agent]]:
    """Starts host agents as the job layer does: with a job folder and a name."""
    started: list[Agent] = []

    def start(folder: Path, name: str, env: dict[str, str] | None = None, within: Sequence[str] = ()) -> Agent:
        """``within``: a command that the agent is started by."""
        started.append(Agent(folder, name, tmp_path / f"{name}-{len(started)}.log", env or {}, within))
        return started[-1]

    yield start
    living = [agent for agent in started if agent.process.poll() is None]
    families = [agent.family() for agent in living]
    for agent in living:
        agent.process.terminate()
    for agent, family in zip(living, families, strict=True):
        agent.wait()
        wait_gone(*family[1:])


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts programs that are killed after the test, should they still run."""
    started: list[Program] = []

    def start(text: str, **kwargs: dict[str, str]) -> Program:
        folder = tmp_path / f"program{len(started)}"
        folder.mkdir()
        started.append(Program(folder, text, **kwargs))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for running in started:
        running.close()


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[MeshFailure]:
    """Failures that nobody handled."""
    seen: list[MeshFailure] = []
    lock = threading.Lock()

    def hook(failure: MeshFailure) -> None:
        with lock:
            seen.append(failure)

    monkeypatch.setattr(public, "unhandled_fault_hook", hook)
    return seen


@pytest.fixture
def fake_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that puts commands of Slurm on PATH, each a shell script given by its text."""

    def install(**scripts: str) -> Path:
        folder = tmp_path / "slurm commands"
        folder.mkdir(exist_ok=True)
        defaults = dict.fromkeys(("sbatch", "srun", "squeue", "scancel", "sinfo", "scontrol"), "exit 0")
        for name, text in {**defaults, **scripts}.items():
            path = folder / name
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        return folder

    return install
