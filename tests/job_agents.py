"""A real host agent, started from a job folder as the job layer starts it, and an actor to run there."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from support import DEADLINE, REPOSITORY

from monarch_slurm.actor import Actor, endpoint
from monarch_slurm.interpreter import module_command
from monarch_slurm.wire import read_invitation, write_invitation


def act_as_another_machine(folder: Path) -> None:
    """Have agents that start from now on join the job in ``folder`` as those of other machines do: by TCP, and without
    a look at the controller's process."""
    invitation = read_invitation(folder / "controller.json")
    write_invitation(folder, replace(invitation, near="", controller_host="another machine", controller_pid=0))


class Agent:
    """An agent of its own process."""

    def __init__(self, folder: Path, name: str, log: Path, env: dict[str, str], within: Sequence[str] = ()) -> None:
        self.log = log
        command = [*within, *module_command("monarch_slurm.host", "--folder", str(folder), "--name", name)]
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


class Worker(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def call_other(self, other: Any) -> list[int]:
        values: list[int] = other.pid.call().get().values()
        return values

    @endpoint
    def children(self) -> list[int]:
        sleep = ["sleep", "1000"]
        return [subprocess.Popen(sleep).pid, subprocess.Popen(sleep, start_new_session=True).pid]
