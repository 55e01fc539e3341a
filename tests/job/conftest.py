from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _outside_of_any_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM", "SBATCH", "MONARCH_")):
            monkeypatch.delenv(name)
    path = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{path}" if path else str(ROOT))
    monkeypatch.chdir(tmp_path)


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


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a path that is short enough for sockets."""
    return tmp_path_factory.mktemp("t", numbered=True)
