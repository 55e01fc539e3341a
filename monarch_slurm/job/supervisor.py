"""What the two supervisors of a job have in common, the one of the program (`batch`) and the one of a host (`node`).

Slurm ends a job (scancel, the time limit) by a SIGTERM to every process of it, so to program, agents and procs at once.
A supervisor does not pass it on, for a program may take a second one as "now".
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import IO

from monarch_slurm.host.exits import signal_name
from monarch_slurm.host.kernel import die_with_parent
from monarch_slurm.inherited import settle_inheritance
from monarch_slurm.wire.task_limits import start_process

BATCH_VARIABLE = "MONARCH_BATCH_JOB"
"""Set to 1 in the environment of a program that runs inside of its job."""

CLIENT_WAIT = 600
"""Seconds that agents wait for a controller outside of the allocation."""

AGENT_GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for the processes of a job."""

KILL_WAIT_VARIABLE = "MONARCH_SLURM_KILL_WAIT"
"""Environment variable of a job's steps: seconds between SIGTERM and SIGKILL of a job that Slurm ends."""

CHECK_SECONDS = 1.0
"""Pause between two looks at the shared folder."""


class Signals:
    """Takes signals as events of a loop in place of interruptions."""

    def __init__(self) -> None:
        self.stop = False
        self.limit_near = False
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        # These replace submitit's, which ignores SIGTERM and requeues on SIGUSR2.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
            signal.signal(number, self._take)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGCONT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])

    def _take(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR2:
            self.limit_near = True
        else:
            self.stop = True

    def wait(self, seconds: float, fd: int | None = None) -> bool:
        """Return when a signal comes or a child ends, at the latest after ``seconds``.

        Returns:
            Whether ``fd`` can be read, which ends the waiting, too.
        """
        mine = self._read.fileno()
        ready, _, _ = select.select([mine] if fd is None else [mine, fd], [], [], seconds)
        if mine in ready:
            self._read.recv(4096)
        return fd in ready


def start_child(
    command: Sequence[str], env: Mapping[str, str], output: int | None = None, errors: int | IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process with a session of its own that is killed when this process ends.

    Args:
        output: descriptor for its output; None leaves it with that of this process.
        errors: where its errors go; None sends them to ``output``.

    Raises:
        LimitError: this process may start no other.
        OSError: it cannot be started.
    """
    parent = os.getpid()

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # outlives the exec; by default it would kill
        die_with_parent(parent)  # or a supervisor that is killed would leave a program that nobody waits for

    return start_process(
        str(command[0]),
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output if errors is None else errors,
        start_new_session=True,
        preexec_fn=prepare,  # safe: this process has one thread, so that nothing can hold a lock in the child
    )


def describe_code(code: int) -> str:
    """Return what a return code of `subprocess.Popen` means."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"


def begin_supervisor() -> None:
    """Begin a supervisor: settle what it has inherited, and have this package's messages go to standard error.

    The root logger is left alone, for submitit has a handler there.
    """
    settle_inheritance()
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger("monarch_slurm")
    package.addHandler(handler)
    package.setLevel(logging.INFO)
