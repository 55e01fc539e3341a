"""The few Linux calls that Python lacks: whose child one is, and who dies with whom."""

from __future__ import annotations

import ctypes
import os
import signal

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


def set_name(name: str) -> None:
    """Set the name that ps and top show; the kernel keeps 15 bytes."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


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


def kill(pid: int) -> None:
    """Kill process ``pid``, unless it is gone already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def kill_group(pid: int) -> None:
    """Kill the process group that ``pid`` leads, unless it is gone already."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


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
