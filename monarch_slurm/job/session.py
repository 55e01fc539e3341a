"""Interactive use of an allocation: the program at a prompt is the controller of its nodes.

`start_session` is called in that program. It starts a supervisor (``python -m monarch_slurm.job.session``) in a session
of its own, which a Ctrl-C at the terminal does not reach. The supervisor keeps a job step on each node, and ends them
all when the program is gone, however it went. The allocation itself is left alone.

One program at a time has the nodes. ``.session-JOBID`` beside the sessions' folders says which; a supervisor that reads
another name there ends, so that a program can take the nodes over from one that hangs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import pickle
import socket
import subprocess
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from monarch_slurm.interpreter import module_command, python_environment
from monarch_slurm.job.address import find_address, node_address
from monarch_slurm.job.allocation import SlurmAllocation
from monarch_slurm.job.batch import BatchPlan
from monarch_slurm.job.diagnosis import gather_or_explain
from monarch_slurm.job.errors import HostsTakenError, JobError
from monarch_slurm.job.folder import JobFolder, tell_once
from monarch_slurm.job.follow import print_notice
from monarch_slurm.job.nodelist import compress
from monarch_slurm.job.status import JobId, run_command
from monarch_slurm.job.steps import Steps
from monarch_slurm.job.supervisor import CHECK_SECONDS, Signals, begin_supervisor
from monarch_slurm.job.unreachable import slurm_failure
from monarch_slurm.owned_files import FileRefusedError, append_owned, open_owned, owned_json, write_whole
from monarch_slurm.wire import sweep_runtime_dirs
from monarch_slurm.wire.process_end import ProcessEnd
from monarch_slurm.wire.task_limits import start_process

if TYPE_CHECKING:
    from monarch_slurm.actor import HostMesh

MODULE = "monarch_slurm.job.session"

STEP_PREFIX = "session-"
"""Slurm's names of the steps of a session begin with this; the program's pid follows."""

ENDING_SECONDS = 15.0
"""What a session that ends may take; then its steps are cancelled."""

CANCEL_SECONDS = 60.0
"""What a step may take to end after it was cancelled: Slurm's KillWait is 30 s unless set."""

TELL_SECONDS = 2.0
"""Time after which the user hears what is waited for."""

_PLAN_FILE = "session.pkl"
_POLL_SECONDS = 0.2
_STEP_GRACE = 5.0

logger = logging.getLogger(MODULE)  # __name__ is __main__ in the supervisor


@dataclass(frozen=True)
class _Owner:
    """The program that has the nodes of an allocation."""

    folder: str
    host: str
    pid: int
    started: float

    @staticmethod
    def me(folder: Path) -> _Owner:
        return _Owner(str(folder), socket.gethostname(), os.getpid(), psutil.Process().create_time())

    @staticmethod
    def read(path: Path) -> _Owner | None:
        try:
            told = owned_json(path, "to believe who has the nodes")
            return _Owner(str(told["folder"]), str(told["host"]), int(told["pid"]), float(told["started"]))
        except FileNotFoundError:
            return None
        except FileRefusedError as error:
            tell_once(f"{error}; it is ignored")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            tell_once(f"{path} does not tell who has the nodes ({error!r}); it is ignored")
        return None

    def is_gone(self) -> bool:
        """Whether it has certainly ended; of another machine nothing is known."""
        if self.host != socket.gethostname():
            return False
        try:
            process = psutil.Process(self.pid)
            return bool(process.create_time() != self.started or process.status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}, folder {self.folder}"


_running: dict[int, tuple[subprocess.Popen[bytes], HostMesh]] = {}
"""The sessions of this program: job id, supervisor, hosts."""


def start_session(
    allocation: SlurmAllocation, plan: BatchPlan, log_dir: Path, take_over: bool, timeout: float
) -> HostMesh:
    """Become the controller of an allocation's nodes, and return them; those that this program has already, if any.

    Args:
        log_dir: folder in which the session's folder is made; all nodes must see it.
        take_over: end the session of another program, should one have the nodes.
        timeout: seconds that all agents may take to start.

    Raises:
        HostsTakenError: another program has the nodes.
        HostStartError: the agent of a node did not come up.
        JobError: see the classes of `monarch_slurm.job`.
    """
    known = _running.get(allocation.job_id)
    if known is not None and known[0].poll() is None:
        return known[1]._again()
    record = log_dir / f".session-{allocation.job_id}"
    _wait_for_predecessor(allocation, record, take_over)
    folder = JobFolder.create(log_dir, f"session-{allocation.job_id}")
    write_whole(record, json.dumps(asdict(_Owner.me(folder.path))).encode())
    _clear_steps(allocation.command_id)
    plan = replace(plan, program=None, step_name=f"{STEP_PREFIX}{os.getpid()}", session=True)
    supervisor = _start_supervisor(allocation, plan, folder, record)
    try:
        hosts = gather_or_explain(folder, allocation.nodes, timeout)
    except BaseException:
        supervisor.terminate()
        supervisor.wait()
        raise
    _running[allocation.job_id] = supervisor, hosts
    return hosts._again()


def _start_supervisor(
    allocation: SlurmAllocation, plan: BatchPlan, folder: JobFolder, record: Path
) -> subprocess.Popen[bytes]:
    from monarch_slurm.controller import publish

    here = allocation.node_name
    toward = node_address(next((name for name in allocation.nodes if name != here), here))
    publish(folder.path, address=find_address(plan.address, toward))
    write_whole(folder.path / _PLAN_FILE, pickle.dumps((allocation, plan)))
    command = module_command(MODULE, f"--folder={folder.path}", f"--record={record}", f"--pid={os.getpid()}")
    env = {
        **os.environ,
        "SLURM_JOB_ID": str(allocation.job_id),
        **({} if allocation.groups else {"SLURM_JOB_NODELIST": compress(allocation.nodes)}),
        **({} if allocation.groups else {"SLURM_JOB_NUM_NODES": str(len(allocation.nodes))}),
    }
    with open(append_owned(folder.batch_log), "ab") as log:
        # A session of its own: a Ctrl-C at the terminal is for the program, and would end srun's steps.
        return start_process(
            "the supervisor of the session",
            command,
            env=python_environment(env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _wait_for_predecessor(allocation: SlurmAllocation, record: Path, take_over: bool) -> None:
    """Return when the nodes are free, or to be taken over.

    Raises:
        HostsTakenError: they are not.
    """
    deadline = time.monotonic() + ENDING_SECONDS
    told = False
    while not take_over and (owner := _Owner.read(record)) is not None and not owner.is_gone():
        here = owner.host == socket.gethostname()
        if here or (time.monotonic() > deadline and _session_steps(allocation.command_id)):
            raise HostsTakenError(
                f"the nodes of job {allocation.job_id} serve another program ({owner}); end it, or take them over with "
                "hosts(take_over=True)"
            )
        if time.monotonic() > deadline:
            return  # its machine is gone
        if not told:
            print_notice(f"waiting up to {ENDING_SECONDS:g} s for another program that had these nodes ({owner})")
            told = True
        time.sleep(_POLL_SECONDS)


def _session_steps(job_id: JobId, prefix: str = STEP_PREFIX) -> list[str]:
    """Return the ids of the steps of all sessions in a job, or of one."""
    done = run_command(["squeue", "-s", "-h", "-j", str(job_id), "-o", "%i|%j"])
    if done.returncode != 0:
        raise slurm_failure(done, "squeue failed", run_command)
    steps = [line.split("|", 1) for line in done.stdout.splitlines()]
    return [step for step, name in steps if name.startswith(prefix)]


def _clear_steps(job_id: JobId) -> None:
    """Wait until no earlier session has a step left; cancel those that do not end.

    Raises:
        HostsTakenError: steps are left although they were cancelled.
    """
    began = time.monotonic()
    told = cancelled = False
    while steps := _session_steps(job_id):
        waited = time.monotonic() - began
        if waited > ENDING_SECONDS and not cancelled:
            print_notice(f"cancelling steps that an earlier session left: {', '.join(steps)}")
            run_command(["scancel", *steps])
            cancelled = True
        elif waited > ENDING_SECONDS + CANCEL_SECONDS:
            raise HostsTakenError(
                f"steps of an earlier session have not ended {CANCEL_SECONDS:g} s after they were cancelled: "
                f"{', '.join(steps)}; is their node well? Try again later, or leave it out with another allocation"
            )
        elif waited > TELL_SECONDS and not told:
            print_notice(f"waiting for the end of an earlier session's steps: {', '.join(steps)}")
            told = True
        time.sleep(_POLL_SECONDS)


class _Supervisor:
    """Keeps the steps of a session as long as its program lives."""

    def __init__(self, folder: JobFolder, record: Path, pid: int) -> None:
        self._folder = folder
        self._record = record
        self._signals = Signals()
        with open_owned(folder.path / _PLAN_FILE, "to load it", private=True, root=False) as file:
            allocation, plan = pickle.load(file)
        assert isinstance(allocation, SlurmAllocation)
        self._job_id = allocation.command_id
        self._plan: BatchPlan = plan
        self._steps = Steps(
            allocation,
            lambda name, index: plan.host_command(folder, name, index, allocation.group_of(index)),
            folder,
        )
        try:
            self._program: ProcessEnd | None = ProcessEnd(pid)
        except ProcessLookupError:
            self._program = None

    def run(self) -> None:
        try:
            self._steps.start()
            while self._program is not None and self._steps.active and not self._signals.stop and self._is_owner():
                self._steps.check(again=True)
                readable = self._signals.wait(CHECK_SECONDS, self._program.fd)
                if readable or (self._program.fd is None and self._program.has_ended_in_proc()):
                    self._program = None
        finally:
            self._end()

    def _is_owner(self) -> bool:
        owner = _Owner.read(self._record)
        return owner is not None and owner.folder == str(self._folder.path)

    def _end(self) -> None:
        if self._is_owner():
            self._record.unlink(missing_ok=True)
        elif self._program is not None:
            logger.warning("another program has taken the nodes over")
        self._folder.write_exit_code(0)  # the tasks on all nodes end by this
        self._folder.controller_file.unlink(missing_ok=True)
        self._steps.end(_STEP_GRACE, self._signals.wait)
        try:
            if left := _session_steps(self._job_id, self._plan.step_name):
                run_command(["scancel", *left])
        except JobError as error:
            logger.warning("cannot see whether steps are left: %s", error)
        sweep_runtime_dirs()  # a program that was killed, as by closing its terminal, leaves its own


def main() -> None:
    """Supervise a session until its program ends."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Keep the steps of a session.")
    parser.add_argument("--folder", type=Path, required=True, help="folder of the session")
    parser.add_argument("--record", type=Path, required=True, help="file that tells which session has the nodes")
    parser.add_argument("--pid", type=int, required=True, help="process of the program")
    options = parser.parse_args()
    begin_supervisor()
    try:
        supervisor = _Supervisor(JobFolder(options.folder), options.record, options.pid)
    except (FileRefusedError, FileNotFoundError) as error:
        logger.error("%s", error)  # noqa: TRY400 - it says all
        raise SystemExit(1) from None
    supervisor.run()


if __name__ == "__main__":
    main()
