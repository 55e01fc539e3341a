"""A job folder and the environment of a pretended allocation of the nodes n1 and n2."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from monarch_slurm.job.folder import FOLDER_VARIABLE, JobFolder
from monarch_slurm.job.processes import find_processes
from monarch_slurm.wire.runtime_dir import sweep_away

DEADLINE = 30.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE:g} s in vain for: {what}"
        time.sleep(0.02)


class Pretended:
    """A pretended job of two nodes, both this machine."""

    def __init__(self, base: Path) -> None:
        self.folder = JobFolder.create(base / "runs", "job")
        self.log = base / "log"
        self.env = {
            **os.environ,
            "SLURM_JOB_ID": "12",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURMD_NODENAME": "n1",
            "XDG_RUNTIME_DIR": str(base),
        }
        self.marker = {FOLDER_VARIABLE: str(self.folder.path)}

    def processes(self) -> set[int]:
        return find_processes(self.folder.path)

    def assert_gone(self) -> None:
        assert self.processes() == set()
        folders = Path(self.env["XDG_RUNTIME_DIR"])
        for folder in folders.glob("ms-*"):
            sweep_away(folder)  # as the next start does with those of killed processes
        assert not list(folders.glob("ms-*"))
