"""The few Linux calls that Python lacks: whose child one is, and who dies with whom."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NAME = 15


def _prctl(option: int, value: int | bytes) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def become_subreaper() -> None:
    """Make orphans among this process's descendants its children (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ``parent`` ends; end now if it has ended already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def set_title(title: str, name: str) -> None:
    """Set what ps and top show of this process: its command line, and its name, of which the kernel keeps 15 bytes.

    The title is cut to the length of the command line that the process was started with: it is written over that, in
    memory which a forked process shares with nobody. The environment, which lies behind, stays as it is.
    """
    _prctl(_PR_SET_NAME, name.encode()[:15])
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, fields 48 and 49 of proc(5)
    size = end - start
    if start and size > 0:
        ctypes.memmove(start, title.encode()[: size - 1].ljust(size, b"\0"), size)


def children() -> list[int]:
    """Return the pids of this process's children, ended ones that are not reaped included."""
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as file:
                found += [int(pid) for pid in file.read().split()]
        except FileNotFoundError:
            continue  # that thread ended meanwhile
    return found


def reap(known: Collection[int]) -> None:
    """Reap the children of this process that have ended, but for those in ``known``, which somebody waits for."""
    for pid in children():
        if pid not in known:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def kill(pid: int) -> None:
    """Kill process ``pid``, unless it is gone already."""
    send(pid, signal.SIGKILL)


def send(pid: int, number: int) -> None:
    """Send a signal to process ``pid``, unless it is gone already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def kill_group(pid: int) -> None:
    """Kill the process group that ``pid`` leads, unless it is gone already."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def kill_group_but(pid: int, spared: Collection[int]) -> None:
    """Kill the processes of the group that ``pid`` leads, but for those in ``spared``."""
    if not spared:
        kill_group(pid)
        return
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal() and int(entry.name) not in spared and family(int(entry.name))[0] == pid:
            kill(int(entry.name))


def family(pid: int) -> tuple[int, int]:
    """Return process group and session of ``pid``; zeros if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    return int(fields[2]), int(fields[3])


def environment_value(pid: int, name: str) -> str | None:
    """Return the value of variable ``name`` that process ``pid`` was executed with."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:  # it is gone, or has changed its user
        return None
    prefix = name.encode() + b"="
    return next(
        (entry[len(prefix) :].decode(errors="replace") for entry in variables if entry.startswith(prefix)), None
    )
