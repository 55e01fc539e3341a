"""System calls that this package uses and that an old kernel, or the seccomp list of a container, may refuse.

The oldest kernel that everything works on is 4.2, by these: files ``/proc/PID/task/TID/children`` in every kernel
(4.2), memfd_create(2) (3.17), PR_SET_CHILD_SUBREAPER (3.4), process_vm_readv(2) (3.2).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass

from monarch_slurm.errors import MonarchSlurmError

_PR_GET_CHILD_SUBREAPER = 37
_libc = ctypes.CDLL(None, use_errno=True)


class MissingSystemCallError(MonarchSlurmError):
    """The kernel, or a container's seccomp list, refuses what this package needs."""


@dataclass(frozen=True)
class SystemCall:
    """One call, or a file of the kernel.

    Attributes:
        name: its name in the manual.
        since: version of Linux that it came with.
        probe: tries it; raises OSError if it is refused.
        without: what happens without it; empty if nothing works then.
    """

    name: str
    since: str
    probe: Callable[[], None]
    without: str = ""


def refused(calls: tuple[SystemCall, ...] | None = None) -> list[tuple[SystemCall, str]]:
    """Return those of ``calls`` (None: all that this package uses) that are refused, with the kernel's reason."""
    found = []
    for call in CALLS if calls is None else calls:
        try:
            call.probe()
        except OSError as error:
            if error.errno != errno.EMFILE:  # that says nothing about the call
                found.append((call, error.strerror or str(error)))
    return found


def check_system_calls() -> None:
    """Make sure that the kernel offers what this package cannot do without.

    Raises:
        MissingSystemCallError: it does not; the text names the calls.
    """
    missing = refused(_REQUIRED)
    if missing:
        raise MissingSystemCallError(describe_missing(missing))


def describe_missing(missing: list[tuple[SystemCall, str]]) -> str:
    """Return a line on required calls that are refused."""
    calls = ", ".join(f"{call.name} (Linux {call.since}): {reason}" for call, reason in missing)
    return (
        f"Linux {platform.release()} on this machine refuses {calls}. monarch_slurm needs it: use a newer kernel, or "
        "allow it in the seccomp list of the container (a newer container engine does)"
    )


def _memfd() -> None:
    fd = os.memfd_create("monarch_slurm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    finally:
        os.close(fd)


def _eventfd() -> None:
    os.close(os.eventfd(0, os.EFD_CLOEXEC))


def _pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _subreaper() -> None:
    value = ctypes.c_int()
    _checked(_libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(value), 0, 0, 0))


def _children() -> None:
    with open(f"/proc/self/task/{os.getpid()}/children"):
        return


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _process_vm() -> None:
    source, target = ctypes.create_string_buffer(1), ctypes.create_string_buffer(1)
    here, there = _IoVec(ctypes.addressof(target), 1), _IoVec(ctypes.addressof(source), 1)
    for call in (_libc.process_vm_readv, _libc.process_vm_writev):
        _checked(call(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0))


def _checked(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


_REQUIRED = (
    SystemCall("eventfd", "2.6.27", _eventfd),
    SystemCall("memfd_create", "3.17", _memfd),
    SystemCall("prctl PR_SET_CHILD_SUBREAPER", "3.4", _subreaper),
    SystemCall("the file /proc/PID/task/TID/children", "4.2", _children),
)

CALLS = (
    *_REQUIRED,
    SystemCall("pidfd_open", "5.3", _pidfd, "the end of a process is noticed up to 0.05 s later"),
    SystemCall("process_vm_readv", "3.2", _process_vm, "buffers between processes of a host go through TCP"),
)
