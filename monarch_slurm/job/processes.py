"""The processes of one job on this machine: found by their environment, ended as a whole.

A process keeps the environment that it was started with and hands it on, whatever session or parent it has by then, so
that also orphans are found.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

from monarch_slurm.job.folder import FOLDER_VARIABLE

_POLL_SECONDS = 0.02

_EXEC_SECONDS = 1.0
"""Time that is waited for a process in the middle of an execve(2)."""


def find_processes(folder: Path, is_wanted: Callable[[set[bytes]], bool] = lambda env: True) -> set[int]:
    """Return the pids of this user's living processes on this machine that belong to the job in ``folder``.

    The calling process and its ancestors are left out.

    Args:
        is_wanted: tells by a process's environment, items such as ``b"NAME=value"``, whether it is looked for.
    """
    wanted = f"{FOLDER_VARIABLE}={folder}".encode()
    spared = _ancestors()
    found = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal() and int(entry.name) not in spared:
            env = _environment(int(entry.name))
            if wanted in env and is_wanted(env):
                found.add(int(entry.name))
    return found


def end_processes(find: Callable[[], Collection[int]], grace: float, ask: int = signal.SIGTERM) -> None:
    """Ask the processes that ``find`` returns to end, and kill those that still live after ``grace`` seconds.

    They are asked by the signal ``ask``.

    Looks again until none is left, for a process may start others until it is gone.
    """
    for pid in find():
        _signal(pid, ask)
    deadline = time.monotonic() + grace
    while find() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    while pids := find():
        for pid in pids:
            _signal(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # gone by itself


def _environment(pid: int) -> set[bytes]:
    """Return the environment of a process of ours; empty for others, for zombies and for those that just ended."""
    deadline = time.monotonic() + _EXEC_SECONDS
    try:
        while True:
            data = Path(f"/proc/{pid}/environ").read_bytes()
            if data or not _has_none_yet(pid) or time.monotonic() > deadline:
                return set(data.split(b"\0"))
    except OSError:
        return set()


def _has_none_yet(pid: int) -> bool:
    """Return whether a process without an environment is, or was until now, in an execve(2) that is about to give it
    one.

    Raises:
        OSError: it is gone.
    """
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    state, start, end = stat[0], stat[47], stat[48]  # env_start and env_end, fields 50 and 51 of proc(5)
    has_memory = not Path(f"/proc/{pid}/statm").read_text().startswith("0 ")  # threads of the kernel have none
    return state not in "ZX" and has_memory and (end == "0" or start != end)


def _ancestors() -> set[int]:
    found = set()
    pid = os.getpid()
    while pid > 0:
        found.add(pid)
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            break
        pid = int(status.split("PPid:", 1)[1].split(None, 1)[0])
    return found
