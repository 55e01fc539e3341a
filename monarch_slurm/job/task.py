"""What runs on each node of an allocation: a small supervisor of the host agent and, on the head node, the program.

Slurm starts one task per node. Each task starts the host agent of its node; the task on the head node also starts the
user's program, which is the controller. When the program ends, its exit code goes into the job's folder, where all
tasks see it, and every task takes down what it started.

Slurm keeps a job that may lose nodes also when it has lost the head. So a task whose agent has ended, for its
controller is gone, stays to see whether the head is gone, too, and ends the job (or has it start again) if so.

Slurm signals every process of a step, not only its tasks. SIGTERM (scancel, the time limit) thus reaches program,
agents and procs at once, and is not passed on, for a program may take a second one as "now". SIGUSR2 (the time limit
is near) is for this supervisor alone, which sends the program a SIGTERM while its agents and procs still work.
"""

from __future__ import annotations

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
from types import FrameType

from monarch_slurm.host.agent import ENDED, FENCED, LEASE_EXPIRED
from monarch_slurm.host.kernel import die_with_parent
from monarch_slurm.job.address import find_address
from monarch_slurm.job.allocation import SlurmAllocation
from monarch_slurm.job.folder import FOLDER_VARIABLE, JobFolder
from monarch_slurm.job.head import Head, end_without_head, head_state, poll_seconds
from monarch_slurm.job.processes import end_processes, find_processes
from monarch_slurm.wire import make_runtime_dir

logger = logging.getLogger(__name__)

BATCH_VARIABLE = "MONARCH_BATCH_JOB"
"""Set to 1 in the environment of a program that runs inside of its job."""

CLIENT_WAIT = 600
"""Seconds that agents wait for a controller outside of the allocation."""

AGENT_GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for an agent and its procs."""

CANNOT_START = 127
"""Exit code of a program that cannot be started, as of a shell."""

CHECK_SECONDS = 1.0
"""Pause between two looks at the shared folder."""


class _Signals:
    """Takes signals as events of a loop in place of interruptions."""

    def __init__(self) -> None:
        self.stop = False
        self.limit_near = False
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        signal.set_wakeup_fd(self._write.fileno())
        # These replace submitit's, which ignores SIGTERM and requeues on SIGUSR2.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
            signal.signal(number, self._take)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGCONT, signal.SIG_DFL)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR2:
            self.limit_near = True
        else:
            self.stop = True

    def wait(self, seconds: float) -> None:
        """Return when a signal comes, at the latest after ``seconds``."""
        self._read.settimeout(seconds)
        try:
            self._read.recv(4096)
        except TimeoutError:
            return


def run_task(folder: str, program: Sequence[str] | None, address: str | None, requeue: bool = False) -> None:
    """Run the task of this node until the job ends; submitit calls this on every node.

    Args:
        folder: of the job.
        program: command line of the controller; None if it runs outside of the allocation.
        address: option for `find_address`; None takes the address that reaches the controller.
        requeue: whether the job starts again when its head is lost, rather than ending.

    Raises:
        SystemExit: the program, or without one this node's agent, has failed.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger("monarch_slurm")  # not the root: submitit has a handler of its own
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    code = _Task(JobFolder(Path(folder)), program, address, requeue).run()
    if code:
        raise SystemExit(code)


class _Task:
    def __init__(self, folder: JobFolder, program: Sequence[str] | None, address: str | None, requeue: bool) -> None:
        self._folder = folder
        self._requeue = requeue
        self._allocation = SlurmAllocation.from_env()
        self._outside = program is None
        self._program = program if self._allocation.is_head else None
        self._address = find_address(address, "") if address is not None else None
        self._signals = _Signals()
        self._runtime_dir = make_runtime_dir()  # around the agent's own, so that nothing is left when that is killed

    def run(self) -> int:
        try:
            controller = self._start_program() if self._program is not None else None
            agent = self._start_agent()
            if controller is not None:
                return self._watch_program(controller, agent)
            return self._watch_agent(agent)
        finally:
            end_processes(lambda: find_processes(self._folder.path), AGENT_GRACE)
            shutil.rmtree(self._runtime_dir, ignore_errors=True)

    def _environment(self, **more: str) -> dict[str, str]:
        return {
            **os.environ,
            FOLDER_VARIABLE: str(self._folder.path),
            "PYTHONUNBUFFERED": "1",
            **more,
        }

    def _start_agent(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "monarch_slurm.host", "--folder", str(self._folder.path)]
        command += ["--name", self._allocation.node_name]
        if self._address is not None:
            command += ["--address", self._address]
        env = self._environment(MONARCH_SLURM_RUNTIME_DIR=str(self._runtime_dir))
        if self._outside:
            env.setdefault("MONARCH_SLURM_MESH_ORPHAN_TIMEOUT", str(CLIENT_WAIT))
        return _start(command, env)

    def _start_program(self) -> subprocess.Popen[bytes]:
        assert self._program is not None
        log = os.open(self._folder.controller_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            return _start(self._program, self._environment(**{BATCH_VARIABLE: "1"}), log)
        except OSError as error:
            message = f"error: cannot start {self._program[0]} on {self._allocation.node_name}: {error.strerror}\n"
            os.write(log, message.encode())
            self._folder.write_exit_code(CANNOT_START)
            raise SystemExit(CANNOT_START) from None
        finally:
            os.close(log)

    def _watch_program(self, controller: subprocess.Popen[bytes], agent: subprocess.Popen[bytes]) -> int:
        agent_told = stop_told = False
        while (code := controller.poll()) is None:
            if agent.poll() is not None and not agent_told:
                logger.warning("the agent of this node ended: %s", _describe(agent.returncode))
                agent_told = True
            if self._signals.stop and not stop_told:
                logger.warning("SIGTERM: waiting for the program to end")
                stop_told = True
            if self._signals.limit_near:
                logger.warning("the time limit is near: asking the program to end")
                controller.terminate()
                self._signals.limit_near = False
            self._signals.wait(CHECK_SECONDS)
        code = code if code >= 0 else 128 - code
        logger.info("the program ended: %s", _describe(controller.returncode))
        self._folder.write_exit_code(code)
        self._folder.controller_file.unlink(missing_ok=True)  # agents that have missed its last word end by this
        return code

    def _watch_agent(self, agent: subprocess.Popen[bytes]) -> int:
        while (code := agent.poll()) is None:
            self._signals.wait(CHECK_SECONDS)
            if self._signals.stop or self._folder.exit_code() is not None:
                return 0
        logger.info("the agent ended: %s", _describe(code))
        if code in (ENDED, LEASE_EXPIRED, FENCED):
            self._stand_by()
            return 0
        return code if code >= 0 else 128 - code

    def _stand_by(self) -> None:
        """Stay until the job ends; end it if nobody else can."""
        first, pause = poll_seconds(len(self._allocation.nodes))
        next_look = time.monotonic() + first
        while not self._signals.stop and self._folder.exit_code() is None:
            if time.monotonic() >= next_look:
                state = head_state(self._allocation.job_id)
                if state is Head.LOST:
                    end_without_head(self._folder, self._allocation, self._requeue)
                    return
                if state is Head.JOB_ENDED or (state is Head.THERE and self._outside):
                    return
                next_look = time.monotonic() + pause
            self._signals.wait(CHECK_SECONDS)


def _start(command: Sequence[str], env: dict[str, str], output: int | None = None) -> subprocess.Popen[bytes]:
    parent = os.getpid()

    def prepare() -> None:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # outlives the exec; by default it would kill
        die_with_parent(parent)  # or a task that is killed would leave a program that nobody waits for

    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=prepare,  # safe: this process has one thread, so that nothing can hold a lock in the child
    )


def _describe(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
