"""What the batch script runs on the head node: the user's program, and a job step for each host.

The program is the controller. When it ends, its exit code goes into the job's folder, where all hosts see it, and is
the exit code of the job. The hosts' steps end by themselves then; what is left of them Slurm ends with the job.

Slurm gives the notice that the time limit is near (SIGUSR2) to this process alone, which sends the program a SIGTERM
while agents and procs still work. A program that has saved then (`monarch_slurm.job.notice`) is started again with the
whole job, if the job is one that may be.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from monarch_slurm.job.allocation import SlurmAllocation
from monarch_slurm.job.container import Container
from monarch_slurm.job.errors import JobError
from monarch_slurm.job.folder import FOLDER_VARIABLE, JobFolder
from monarch_slurm.job.head_lock import HeadLock, SecondHeadError
from monarch_slurm.job.notice import SAVED
from monarch_slurm.job.processes import end_processes, find_processes
from monarch_slurm.job.requested import cancel_all, cancel_waiting
from monarch_slurm.job.requeue import (
    CRASHES,
    MOST_QUICK_KILLS,
    QUICK_SECONDS,
    kill_wait,
    may_start_again,
    requeue,
    why_asked_to_end,
)
from monarch_slurm.job.slurm_options import check_srun_options
from monarch_slurm.job.steps import HOST_STEP, Steps, program_step, signal_program_step, step_command, step_environment
from monarch_slurm.job.supervisor import (
    AGENT_GRACE,
    BATCH_VARIABLE,
    CHECK_SECONDS,
    KILL_WAIT_VARIABLE,
    Signals,
    begin_supervisor,
    describe_code,
    start_child,
)
from monarch_slurm.owned_files import FileRefusedError, append_owned

logger = logging.getLogger(__name__)

CANNOT_START = 127
"""Exit code of a program that cannot be started, as of a shell."""

STEP_GRACE = 5.0
"""Seconds that the hosts have to end by themselves before Slurm is left to end them."""


@dataclass(frozen=True)
class BatchPlan:
    """What the batch script is to run.

    Attributes:
        program: command line of the controller; None if it runs outside of the allocation.
        python: shell words that start Python on the nodes.
        address: option for `find_address` on each node; None takes the address that reaches the controller.
        requeue: whether the job starts again, rather than ending, when its head is lost, its program was asked to end
            and has saved, or its program was killed.
        srun_args: further options of the srun that starts a host.
        preflight: shell commands that must succeed on a node before its agent starts.
        container: in which program and agents run; None for none.
        session: whether the hosts serve a program at a prompt, to whose allocation they must do nothing.
        step_name: Slurm's name of a host's step.
        joins: folder of the job whose controller the hosts join; None for one of their own.
    """

    program: tuple[str, ...] | None
    python: str
    address: str | None = None
    requeue: bool = False
    srun_args: tuple[str, ...] = ()
    preflight: tuple[str, ...] = ()
    container: Container | None = None
    session: bool = False
    step_name: str = HOST_STEP
    joins: str | None = None

    def __post_init__(self) -> None:
        """Check the options of srun.

        Raises:
            JobSpecError: one cannot be given.
        """
        check_srun_options(self.srun_args)

    def program_command(self, folder: JobFolder, node: str, group: int | None = None) -> list[str]:
        """Return the command line of the program on the head node ``node``; ``group`` is the component of that."""
        assert self.program is not None
        if self.container is None:
            return list(self.program)
        command = self.container.wrap(self.program, folder.path)
        return program_step(folder, node, group, command, self.container) if self.container.in_srun else command

    def host_command(self, folder: JobFolder, node: str, index: int, group: int | None = None) -> list[str]:
        """Return the command line of the step of host ``node``; ``group`` is its component of a heterogeneous job."""
        options = [f"--address={self.address}"] if self.address is not None else []
        options += ["--requeue"] if self.requeue else []
        if self.program is None:
            options.append("--joined" if self.joins else "--session" if self.session else "--outside")
        options += [f"--preflight={command}" for command in self.preflight]
        return step_command(
            folder,
            node,
            index,
            shlex.split(self.python),
            options,
            self.srun_args,
            self.container,
            group,
            self.step_name,
        )


def run_batch(folder: str, plan: BatchPlan) -> None:
    """Run a job until it ends; submitit calls this in the batch script.

    Args:
        folder: of the job.

    Raises:
        SystemExit: the program, or without one an agent, has failed.
    """
    begin_supervisor()
    try:
        code = _Batch(JobFolder(Path(folder)), plan).run()
    except (JobError, FileRefusedError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    if code:
        raise SystemExit(code)


class _Batch:
    def __init__(self, folder: JobFolder, plan: BatchPlan) -> None:
        self._folder = folder
        self._plan = plan
        self._allocation = allocation = SlurmAllocation.from_env()
        self._signals = Signals()
        self._again = False
        self._why_again = "the program has saved"
        self._code: int | None = None
        self._program: subprocess.Popen[bytes] | None = None
        self._lock = HeadLock(folder.path, allocation.node_name, allocation.restarts)
        self._lock.take(self._signals.wait)
        os.environ[KILL_WAIT_VARIABLE] = str(kill_wait())
        if allocation.restarts:
            folder.forget_program()
        hosts = folder if plan.joins is None else JobFolder(Path(plan.joins))
        self._steps = Steps(
            allocation, lambda name, index: plan.host_command(hosts, name, index, allocation.group_of(index)), hosts
        )

    def run(self) -> int:
        is_head = True
        try:
            if self._plan.program is None:
                self._steps.start()
                return self._watch_steps()
            self._program = self._start_program()
            self._steps.start()
            return self._watch_program(self._program)
        except SecondHeadError:
            # Nothing but our own children may be ended: what else is found by this folder may be the other head's.
            is_head = False
            if self._program is not None and self._program.poll() is None:
                os.killpg(self._program.pid, signal.SIGKILL)
            self._steps.terminate(STEP_GRACE)
            raise
        finally:
            if is_head:
                self._tidy_up()

    def _tidy_up(self) -> None:
        cancel_waiting(self._folder)
        if self._again:
            # The SIGTERM of Slurm then ends the tasks of the hosts, too.
            again = requeue(self._allocation.command_id, self._signals, why=self._why_again)
            if not again and not self._signals.stop and self._code is not None:
                self._folder.write_exit_code(self._code)  # nobody is to wait for another start
        self._steps.end(STEP_GRACE, self._signals.wait)
        inside = f"{BATCH_VARIABLE}=1".encode()
        end_processes(lambda: find_processes(self._folder.path, lambda env: inside in env), AGENT_GRACE)
        cancel_all(self._folder)
        self._lock.release()

    def _start_program(self) -> subprocess.Popen[bytes]:
        log = append_owned(self._folder.controller_log)
        env = {
            **os.environ,
            FOLDER_VARIABLE: str(self._folder.path),
            BATCH_VARIABLE: "1",
            "PYTHONUNBUFFERED": "1",
        }
        command = self._plan.program_command(self._folder, self._allocation.node_name, self._allocation.group_of(0))
        if self._plan.container is not None and self._plan.container.in_srun:
            env = {**step_environment(env, self._folder)}
        try:
            return start_child(command, env, log)
        except OSError as error:
            message = f"error: cannot start {command[0]} on {self._allocation.node_name}: {error.strerror}\n"
            os.write(log, message.encode())
            self._folder.write_exit_code(CANNOT_START)
            raise SystemExit(CANNOT_START) from None
        finally:
            os.close(log)

    def _watch_program(self, controller: subprocess.Popen[bytes]) -> int:
        stop_told = limit_told = False
        began = time.monotonic()
        while (code := controller.poll()) is None:
            if self._signals.stop and not stop_told:
                logger.warning("SIGTERM: waiting for the program to end")
                stop_told = True
            if self._signals.limit_near and not limit_told:
                reason = why_asked_to_end(self._allocation.command_id)
                logger.warning("%s is near: asking the program to end", reason)
                self._folder.write_notice(reason)
                self._ask_to_end(controller)
                limit_told = True
            self._steps.check(again=not self._signals.stop)
            self._lock.beat()
            self._signals.wait(CHECK_SECONDS)
        code = code if code >= 0 else 128 - code
        logger.info("the program ended: %s", describe_code(controller.returncode))
        asked = limit_told or self._signals.stop
        if asked and self._plan.requeue and code in (SAVED, 128 + signal.SIGTERM):  # or it was asked before it could
            # No exit code: whoever follows the job waits for its next start. After a SIGTERM it is Slurm that ends the
            # job, and that starts it again, unless somebody has cancelled it.
            self._again = not self._signals.stop
        elif not asked and self._plan.requeue and self._has_crashed(controller.returncode):
            said = describe_code(128 - code)
            if may_start_again(self._folder, time.monotonic() - began):
                self._again, self._why_again = True, f"the program was {said}"
            else:
                logger.error(
                    "the program was %s, %d times in a row within %g s of its start: the job is not started again",
                    said, MOST_QUICK_KILLS, QUICK_SECONDS,
                )  # fmt: skip
                self._folder.write_exit_code(code)
        else:
            self._folder.write_exit_code(code)
        self._code = code
        self._folder.controller_file.unlink(missing_ok=True)  # agents that have missed its last word end by this
        self._folder.admin_file.unlink(missing_ok=True)
        return code

    def _has_crashed(self, returncode: int) -> bool:
        """Return whether a signal has ended the program that nobody sends to ask for its end."""
        in_srun = self._plan.container is not None and self._plan.container.in_srun
        return (returncode - 128 if in_srun else -returncode) in CRASHES  # srun returns what a shell would

    def _ask_to_end(self, controller: subprocess.Popen[bytes]) -> None:
        if self._plan.container is None or not self._plan.container.in_srun:
            controller.terminate()
        else:  # srun does not pass a SIGTERM on, but kills its step
            signal_program_step(self._allocation.command_id)

    def _watch_steps(self) -> int:
        while self._steps.active and not self._signals.stop:
            self._steps.check(again=not self._signals.stop)
            self._lock.beat()
            self._signals.wait(CHECK_SECONDS)
        return self._steps.worst
