"""What the batch script runs on the head node: the user's program, and a job step for each host.

The program is the controller. When it ends, its exit code goes into the job's folder, where all hosts see it, and is
the exit code of the job. The hosts' steps end by themselves then; what is left of them Slurm ends with the job.

Slurm gives the notice that the time limit is near (SIGUSR2) to this process alone, which sends the program a SIGTERM
while agents and procs still work.
"""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from monarch_slurm.job.allocation import SlurmAllocation
from monarch_slurm.job.folder import FOLDER_VARIABLE, JobFolder
from monarch_slurm.job.processes import end_processes, find_processes
from monarch_slurm.job.steps import Steps, step_command
from monarch_slurm.job.supervisor import (
    AGENT_GRACE,
    BATCH_VARIABLE,
    CHECK_SECONDS,
    Signals,
    describe_code,
    set_up_log,
    start_child,
)

logger = logging.getLogger(__name__)

CANNOT_START = 127
"""Exit code of a program that cannot be started, as of a shell."""

STEP_GRACE = 5.0
"""Seconds that the hosts have to end by themselves before Slurm is left to end them."""


def run_batch(folder: str, program: Sequence[str] | None, address: str | None, requeue: bool, python: str) -> None:
    """Run a job until it ends; submitit calls this in the batch script.

    Args:
        folder: of the job.
        program: command line of the controller; None if it runs outside of the allocation.
        address: option for `find_address` on each node; None takes the address that reaches the controller.
        requeue: whether the job starts again when its head is lost, rather than ending.
        python: shell words that start Python on the nodes.

    Raises:
        SystemExit: the program, or without one an agent, has failed.
    """
    set_up_log()
    code = _Batch(JobFolder(Path(folder)), program, address, requeue, shlex.split(python)).run()
    if code:
        raise SystemExit(code)


class _Batch:
    def __init__(
        self, folder: JobFolder, program: Sequence[str] | None, address: str | None, requeue: bool, python: list[str]
    ) -> None:
        self._folder = folder
        self._program = program
        self._allocation = SlurmAllocation.from_env()
        self._signals = Signals()
        options = [f"--address={address}"] if address is not None else []
        options += ["--requeue"] if requeue else []
        options += ["--outside"] if program is None else []
        self._steps = Steps(
            self._allocation, lambda name, index: step_command(folder, name, index, python, options), folder
        )

    def run(self) -> int:
        try:
            if self._program is None:
                self._steps.start()
                return self._watch_steps()
            controller = self._start_program(self._program)
            self._steps.start()
            return self._watch_program(controller)
        finally:
            self._steps.end(STEP_GRACE, self._signals.wait)
            inside = f"{BATCH_VARIABLE}=1".encode()
            end_processes(lambda: find_processes(self._folder.path, lambda env: inside in env), AGENT_GRACE)

    def _start_program(self, program: Sequence[str]) -> subprocess.Popen[bytes]:
        log = os.open(self._folder.controller_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        env = {
            **os.environ,
            FOLDER_VARIABLE: str(self._folder.path),
            BATCH_VARIABLE: "1",
            "PYTHONUNBUFFERED": "1",
        }
        try:
            return start_child(program, env, log)
        except OSError as error:
            message = f"error: cannot start {program[0]} on {self._allocation.node_name}: {error.strerror}\n"
            os.write(log, message.encode())
            self._folder.write_exit_code(CANNOT_START)
            raise SystemExit(CANNOT_START) from None
        finally:
            os.close(log)

    def _watch_program(self, controller: subprocess.Popen[bytes]) -> int:
        stop_told = False
        while (code := controller.poll()) is None:
            if self._signals.stop and not stop_told:
                logger.warning("SIGTERM: waiting for the program to end")
                stop_told = True
            if self._signals.limit_near:
                logger.warning("the time limit is near: asking the program to end")
                controller.terminate()
                self._signals.limit_near = False
            self._steps.check(again=not self._signals.stop)
            self._signals.wait(CHECK_SECONDS)
        code = code if code >= 0 else 128 - code
        logger.info("the program ended: %s", describe_code(controller.returncode))
        self._folder.write_exit_code(code)
        self._folder.controller_file.unlink(missing_ok=True)  # agents that have missed its last word end by this
        self._folder.admin_file.unlink(missing_ok=True)
        return code

    def _watch_steps(self) -> int:
        while self._steps.active and not self._signals.stop:
            self._steps.check(again=not self._signals.stop)
            self._signals.wait(CHECK_SECONDS)
        return self._steps.worst
