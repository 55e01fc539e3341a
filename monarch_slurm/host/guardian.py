"""The guardian: the agent's parent, which does nothing until the agent ends, and then ends what the agent has left
behind.

An agent that is killed cannot clean up. The kernel kills its procs with it (`kernel.die_with_parent`), but not what
those had started. The guardian is a subreaper, so all that becomes its child, however it tried to leave its family.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.host import kernel

FORWARDED = (signal.SIGTERM, signal.SIGHUP)


def guard(run_agent: Callable[[], int]) -> int:
    """Call ``run_agent`` in a child process; return its exit code once the child and all its descendants are gone.

    A child that a signal ended counts as 128 and the signal's number, as in a shell. ``run_agent`` gets a process
    without other threads, whatever this one has.
    """
    before = set(kernel.children())
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # none may come before there is somebody to pass it to
    guardian = os.getpid()
    agent = os.fork()
    if agent == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        _be_agent(run_agent, guardian)
    kernel.become_subreaper()
    agent_fd = os.pidfd_open(agent)

    def forward(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            signal.pidfd_send_signal(agent_fd, number)

    before_guarding = {number: signal.signal(number, forward) for number in FORWARDED}
    before_guarding[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    _, status = os.waitpid(agent, 0)
    for number, handler in before_guarding.items():
        signal.signal(number, handler)
    os.close(agent_fd)
    end_children(lambda: [pid for pid in kernel.children() if pid not in before])
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _be_agent(run_agent: Callable[[], int], guardian: int) -> NoReturn:
    code = 1
    try:
        kernel.die_with_parent(guardian)
        code = run_agent()
    except MonarchSlurmError as error:
        print(f"error: {error}", file=sys.stderr)
    except BaseException:  # the last frame of the process: nothing above could tell of it
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue
        os._exit(code)


def end_children(children: Callable[[], list[int]]) -> None:
    """Kill and reap children, and those that become children when their parents end, until there are none."""
    while pids := children():
        for pid in pids:
            kernel.kill(pid)
        for pid in pids:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue
        time.sleep(0.001)
