"""What runs on each node of an allocation: ``python -m monarch_slurm.job.node``, a small supervisor of the host agent.

Slurm keeps a job that may lose nodes also when it has lost the head. So a task whose agent has ended, for its
controller is gone, stays to see whether the head is gone, too, and ends the job (or has it start again) if so.

The step around the agent may break while the agent is well: srun or slurmstepd is killed. The head then starts another
step here, whose task finds the first one's (the predecessor) alive and only watches it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from monarch_slurm.config import settings
from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.host import kernel
from monarch_slurm.host.agent import ENDED, LEASE_EXPIRED
from monarch_slurm.host.dial import connection_trouble
from monarch_slurm.host.identity import SUPERVISED_VARIABLE
from monarch_slurm.interpreter import module_command, python_environment
from monarch_slurm.job.address import find_address
from monarch_slurm.job.allocation import SlurmAllocation
from monarch_slurm.job.errors import JobError, PreflightError
from monarch_slurm.job.folder import FOLDER_VARIABLE, JobFolder
from monarch_slurm.job.head import Head, end_without_head, head_state, poll_seconds
from monarch_slurm.job.processes import end_processes, find_processes
from monarch_slurm.job.status import run_command
from monarch_slurm.job.steps import HIDDEN_VARIABLE
from monarch_slurm.job.supervisor import (
    AGENT_GRACE,
    BATCH_VARIABLE,
    CHECK_SECONDS,
    CLIENT_WAIT,
    KILL_WAIT_VARIABLE,
    Signals,
    begin_supervisor,
    describe_code,
    start_child,
)
from monarch_slurm.wire import KeyFileError, make_runtime_dir, read_invitation

MODULE = "monarch_slurm.job.node"

PROGRAM_SHARE = 2 / 3
"""Part of ``KillWait`` for which a program that Slurm asks to end keeps its agents and procs."""

LOOK_SECONDS = 10.0
"""Pause between two looks whether an agent that has just started has reached the controller."""

DIAL_SECONDS = 2.0
"""Time for the controller's machine to take a connection."""

logger = logging.getLogger(MODULE)  # __name__ is __main__ here


def main() -> int:
    """Run the task of this node until the job ends; return its exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Run the task of one node of a job.")
    parser.add_argument("--folder", type=Path, required=True, help="folder of the job")
    parser.add_argument("--index", type=int, required=True, help="position of this node in the job")
    parser.add_argument("--address", help="interface, network or IP address of this node that others dial")
    parser.add_argument("--requeue", action="store_true", help="start the job again when its head is lost")
    parser.add_argument("--outside", action="store_true", help="the controller runs outside of the allocation")
    parser.add_argument("--joined", action="store_true", help="the controller is that of another job")
    parser.add_argument("--session", action="store_true", help="the controller is a program at a prompt")
    parser.add_argument("--preflight", action="append", default=[], help="command that must succeed before the agent")
    options = parser.parse_args()
    try:
        begin_supervisor()
        _restore_environment(options.index)
        check_preflight(options.preflight)
        JobFolder(options.folder).tell_proc_logs(settings().log_dir)
        return _Task(JobFolder(options.folder), options).run()
    except MonarchSlurmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _restore_environment(index: int) -> None:
    """Make the environment that of the only step of the job, with one task on each node."""
    for name, value in json.loads(os.environ.pop(HIDDEN_VARIABLE, "{}")).items():
        os.environ.setdefault(name, value)
    count = str(len(SlurmAllocation.from_env().nodes))
    os.environ.update(dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID", "SLURM_GTIDS"), str(index)))
    os.environ.update(dict.fromkeys(("SLURM_NNODES", "SLURM_NTASKS", "SLURM_NPROCS"), count))
    os.environ["SLURM_TASKS_PER_NODE"] = f"1(x{count})"


def check_preflight(commands: Sequence[str]) -> None:
    """Run shell commands one after the other.

    Raises:
        PreflightError: one has failed; what it said is in the text.
    """
    for command in commands:
        done = subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        if done.returncode != 0:
            said = done.stdout.decode(errors="replace").strip()
            raise PreflightError(
                f"pre-flight command {command!r} failed with {describe_code(done.returncode)}"
                + (f": {said}" if said else "")
            )


class _Task:
    def __init__(self, folder: JobFolder, options: argparse.Namespace) -> None:
        self._folder = folder
        self._requeue: bool = options.requeue
        self._outside: bool = options.outside
        self._session: bool = options.session
        self._joined: bool = options.joined
        self._allocation = SlurmAllocation.from_env()
        # a job of one node may use any address of it, for nobody else dials it
        toward = "127.0.0.1" if len(self._allocation.nodes) == 1 and not (self._outside or self._joined) else None
        self._address = find_address(options.address, toward) if options.address is not None else None
        self._signals = Signals()
        self._trouble: str | None = ""
        self._apart: bool = options.index > 0 and not (self._outside or self._joined or self._session)
        self._slurmstepd = os.getppid()
        alone = self._outside or self._session  # no program of the job that would have to save something
        self._patience = 0.0 if alone else float(os.environ.get(KILL_WAIT_VARIABLE, "0")) * PROGRAM_SHARE
        self._stop_at: float | None = None

    def run(self) -> int:
        if not self._outlive_predecessors():
            return 0
        runtime_dir = make_runtime_dir()  # around the agent's own, so that nothing is left when that is killed
        try:
            return self._watch(self._start_agent(runtime_dir))
        finally:
            end_processes(lambda: self._find(own=True), AGENT_GRACE, signal.SIGHUP)
            shutil.rmtree(runtime_dir, ignore_errors=True)

    def _outlive_predecessors(self) -> bool:
        """Return when nothing is left here of earlier steps of this host: whether an agent is to start."""
        watched = False
        while predecessors := self._find_predecessors():
            watched = True
            logger.info("watching the task that an earlier step has left here (pid %d)", predecessors[0])
            while _command_line(predecessors[0]) and not self._is_over():
                self._signals.wait(CHECK_SECONDS)
                self._check_step()
            if self._is_over():
                end_processes(lambda: self._find(own=False), AGENT_GRACE, signal.SIGHUP)
                return False
        end_processes(lambda: self._find(own=False), 0.0, signal.SIGHUP)
        return not (watched and self._outside and not self._folder.controller_file.exists())

    def _find(self, own: bool) -> set[int]:
        """Return the processes of this step here, or those of other steps for this host."""
        mine = f"SLURM_STEP_ID={os.environ.get('SLURM_STEP_ID', '')}".encode()
        inside = f"{BATCH_VARIABLE}=1".encode()  # the program's own

        def is_wanted(env: set[bytes]) -> bool:
            return inside not in env and any(
                item.startswith(b"SLURM_STEP_ID=") and (item == mine) is own for item in env
            )

        return find_processes(self._folder.path, is_wanted)

    def _find_predecessors(self) -> list[int]:
        return sorted(pid for pid in self._find(own=False) if MODULE.encode() in _command_line(pid))

    def _start_agent(self, runtime_dir: Path) -> subprocess.Popen[bytes]:
        command = module_command("monarch_slurm.host", "--folder", str(self._folder.path))
        command += ["--name", self._allocation.node_name]
        command += ["--apart"] if self._apart else []
        if self._address is not None:
            command += ["--address", self._address]
        env = {**os.environ, FOLDER_VARIABLE: str(self._folder.path), "MONARCH_SLURM_RUNTIME_DIR": str(runtime_dir)}
        if self._patience:
            env[SUPERVISED_VARIABLE] = "1"
        if self._outside or self._session:  # a program at a prompt may be stopped by Ctrl-Z
            env.setdefault("MONARCH_SLURM_MESH_ORPHAN_TIMEOUT", str(CLIENT_WAIT))
        return start_child(command, python_environment(env))

    def _is_over(self) -> bool:
        """Return whether this task is to end: the program has, or Slurm said so and the program had time to save."""
        if self._folder.exit_code() is not None:
            return True
        if not self._signals.stop:
            return False
        if self._stop_at is None:
            self._stop_at = time.monotonic() + self._patience
        return time.monotonic() >= self._stop_at or not self._folder.controller_file.exists()

    def _watch(self, agent: subprocess.Popen[bytes]) -> int:
        next_look = time.monotonic() + LOOK_SECONDS
        while (code := agent.poll()) is None:
            self._signals.wait(CHECK_SECONDS)
            if os.getpid() == 1:  # of a container: every orphan there is its child
                kernel.reap({agent.pid})
            if self._is_over():
                return 0
            self._check_step()
            if self._trouble is not None and time.monotonic() >= next_look:
                self._look_for_connection(agent)
                next_look = time.monotonic() + LOOK_SECONDS
        logger.info("the agent ended: %s", describe_code(code))
        if code in (ENDED, LEASE_EXPIRED) and not (self._session or self._joined):
            return self._stand_by(code)
        return code if code >= 0 else 128 - code

    def _look_for_connection(self, agent: subprocess.Popen[bytes]) -> None:
        """Say in the log why the agent has not reached the controller yet; ask no more once it has."""
        try:
            trouble = connection_trouble(read_invitation(self._folder.controller_file), agent.pid)
        except (FileNotFoundError, KeyFileError):
            return  # there is no controller yet
        if trouble is not None and trouble != self._trouble:
            logger.warning("host %s %s; trying again", self._allocation.node_name, trouble)
        self._trouble = trouble

    def _check_step(self) -> None:
        """Tell Slurm when the step around this task is gone, for srun does not notice; the head starts another one."""
        if os.getppid() == self._slurmstepd:
            return
        self._slurmstepd = os.getppid()
        step = f"{self._allocation.command_id}.{os.environ.get('SLURM_STEP_ID')}"
        logger.warning("slurmstepd has ended, and step %s with it", step)
        try:
            run_command(["scancel", step])
        except JobError as error:
            logger.warning("cannot end step %s: %s", step, error)

    def _stand_by(self, code: int) -> int:
        """Stay until the job ends, and end it if nobody else can; return ``code`` if the host is to start again."""
        first, pause = poll_seconds(len(self._allocation.nodes))
        next_look = time.monotonic() + first
        while not self._is_over():
            if time.monotonic() >= next_look:
                state = head_state(self._allocation.command_id)
                if state is Head.LOST:
                    end_without_head(self._folder, self._allocation, self._requeue)
                    return 0
                if state is Head.JOB_ENDED or (state is Head.THERE and self._outside):
                    return 0
                # Slurm takes minutes to notice a loss; until then it calls any head "there".
                if state is Head.THERE and code == LEASE_EXPIRED and self._controller_answers():
                    return code  # only the network was away
                next_look = time.monotonic() + pause
            self._signals.wait(CHECK_SECONDS)
        return 0

    def _controller_answers(self) -> bool:
        try:
            ip, _, port = read_invitation(self._folder.controller_file).address.removeprefix("tcp://").rpartition(":")
            with socket.create_connection((ip.strip("[]"), int(port)), timeout=DIAL_SECONDS):
                return True
        except (OSError, KeyFileError):
            return False


def _command_line(pid: int) -> list[bytes]:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        return []


if __name__ == "__main__":
    sys.exit(main())
