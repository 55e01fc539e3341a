"""The guardian: the agent's parent, which does nothing until the agent ends, and then ends what the agent has left
behind.

An agent that is killed cannot clean up. The kernel kills its procs with it (`kernel.die_with_parent`), but not what
those had started. The guardian is a subreaper, so all that becomes its child, however it tried to leave its family.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.host import kernel
from monarch_slurm.host.shared_memory_files import CLEANER_SECONDS, SharedMemoryFiles, cleans_up
from monarch_slurm.inherited import flush_streams
from monarch_slurm.wire.limits import LimitError
from monarch_slurm.wire.task_limits import task_limit

FORWARDED = (signal.SIGTERM, signal.SIGHUP)


def guard(run_agent: Callable[[], int]) -> int:
    """Call ``run_agent`` in a child process; return its exit code once the child and all its descendants are gone.

    A child that a signal ended counts as 128 and the signal's number, as in a shell. ``run_agent`` gets a process
    without other threads, whatever this one has.

    Raises:
        LimitError: the child cannot be started.
    """
    before, started = set(kernel.children()), time.time()
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # none may come before there is somebody to pass it to
    guardian = os.getpid()
    flush_streams()  # or the child would write once more what is buffered
    kernel.become_subreaper()  # before there is an agent: one that ends at once may leave orphans
    try:
        agent = os.fork()
    except OSError as error:
        raise LimitError(task_limit("the agent cannot be started", error)) from None
    if agent == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        _be_agent(run_agent, guardian)
    before_guarding = {
        number: signal.signal(number, lambda number, frame: kernel.send(agent, number)) for number in FORWARDED
    }
    before_guarding[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    _wait_for(agent)
    # Until the agent is reaped, its pid is nobody else's; from here on no signal is passed on.
    for number, handler in before_guarding.items():
        signal.signal(number, handler)
    _, status = os.waitpid(agent, 0)
    memory = SharedMemoryFiles()
    for left in end_children(lambda: [pid for pid in kernel.children() if pid not in before]):
        memory.note(left, started)
    memory.sweep()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _wait_for(agent: int) -> None:
    """Wait for the end of the agent, but leave it to be reaped. As process 1 of a PID namespace, reap orphans, too."""
    while os.getpid() == 1:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        if ended is not None and ended.si_pid == agent:
            return
        if ended is not None:
            os.waitpid(ended.si_pid, 0)
    os.waitid(os.P_PID, agent, os.WEXITED | os.WNOWAIT)


def _be_agent(run_agent: Callable[[], int], guardian: int) -> NoReturn:
    code = 1
    try:
        kernel.die_with_parent(guardian)
        code = run_agent()
    except MonarchSlurmError as error:
        print(f"error: {error}", file=sys.stderr)
    except SystemExit as end:  # a signal came before the agent was ready for it
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # the last frame of the process: nothing above could tell of it
        sys.excepthook(*sys.exc_info())
    finally:
        flush_streams()
        os._exit(code)


def end_children(children: Callable[[], list[int]]) -> set[int]:
    """Kill and reap children, and those that become children when their parents end, until there are none.

    Those that clean up shared memory after others get `CLEANER_SECONDS` to end by themselves.

    Returns:
        The pids of all of them.
    """
    ended: set[int] = set()
    deadline = time.monotonic() + CLEANER_SECONDS
    while pids := children():
        ended.update(pids)
        late = time.monotonic() > deadline
        for pid in pids:
            if late or not cleans_up(pid):
                kernel.kill(pid)
        for pid in pids:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue
        time.sleep(0.001)
    return ended
