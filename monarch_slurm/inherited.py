"""What a process inherits from whoever started it, made as processes of this package need it.

Signal dispositions and the signal mask outlive exec(2), and so do closed standard descriptors. Shells
(``trap '' CHLD``, ``2>&-``), notebook servers, daemonisers and launchers leave all kinds of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys

from monarch_slurm.errors import MonarchSlurmError

_libc = ctypes.CDLL(None)
_STANDARD = (0, 1, 2)


class ForeignProcError(MonarchSlurmError):
    """``/proc`` shows another PID namespace than that of this process."""


def settle_inheritance() -> None:
    """Begin a process of this package, whatever started it. To be called first in it, from the main thread.

    No signal is blocked, the ends of children are reported, and descriptors 0, 1 and 2 are open. Other signals that
    were ignored stay so: below nohup(1), SIGHUP does not end what this process starts.

    Raises:
        ForeignProcError: ``/proc`` belongs to another PID namespace.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    report_children()
    open_standard_descriptors()
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:  # Python found the descriptor closed
            stream = open(fd, mode, closefd=False)  # noqa: SIM115 - as long as the process
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    _check_proc()


def report_children() -> None:
    """Have the kernel report how children of this process end. For any thread.

    While SIGCHLD is ignored, the kernel reaps them itself: every exit code reads as 0.
    """
    if ignores(signal.SIGCHLD):
        if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
            with contextlib.suppress(ValueError):  # only the main thread may tell Python
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return
        _libc.signal(int(signal.SIGCHLD), None)


def ignores(number: int) -> bool:
    """Return whether this process ignores a signal."""
    return bool(_signal_set("SigIgn") & 1 << (number - 1))


def main_thread_blocks(number: int) -> bool:
    """Return whether the main thread of this process blocks a signal."""
    return bool(_signal_set("SigBlk") & 1 << (number - 1))


def _signal_set(name: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key == name:
                return int(value, 16)
    return 0


def open_standard_descriptors() -> None:
    """Open ``/dev/null`` for those of the descriptors 0, 1 and 2 that are closed.

    Else the next file or socket would get that number, and whatever prints would write into it.
    """
    for fd in _STANDARD:
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            os.set_inheritable(fd, True)


def stream_for_child(name: str) -> int | None:
    """Return what a child gets as its ``stdout`` or ``stderr``, as `subprocess.Popen` takes it: that of this process.

    Where this process was started without it, the number may meanwhile belong to a file of the program.
    """
    return None if getattr(sys, f"__{name}__") is not None else subprocess.DEVNULL


def flush_streams() -> None:
    """Write out what Python has buffered for standard output and error, as far as they are there."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


def _check_proc() -> None:
    try:
        shown = os.readlink("/proc/self")
    except OSError:
        shown = "nothing"
    if shown != str(os.getpid()):
        raise ForeignProcError(
            f"/proc does not show this process (pid {os.getpid()}; /proc/self is {shown}): /proc must be mounted for "
            "the PID namespace of the process; unshare does so with --mount-proc"
        )
