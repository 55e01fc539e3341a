"""Noticing that a process has ended: by a pidfd, or by looking at ``/proc`` where the kernel offers no pidfd.

pidfd_open(2) exists since Linux 5.3. The seccomp lists of older container engines forbid it (EPERM).
"""

from __future__ import annotations

import errno
import os

LOOK_SECONDS = 0.05
"""Pause between two looks at a process for which there is no pidfd."""

_NOT_OFFERED = (errno.ENOSYS, errno.EPERM, errno.EACCES)
_ENDED_STATES = (b"Z", b"X")


class ProcessEnd:
    """The end of one process of this machine, which need not be a child.

    Attributes:
        fd: pidfd, which becomes readable when the process has ended; None if the kernel offers none.

    Raises:
        ProcessLookupError: there is no such process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.fd: int | None = None
        self._started = b""
        try:
            self.fd = os.pidfd_open(pid)
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise
            _, self._started = _state(pid)
            if not self._started:
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from None

    def has_ended_in_proc(self) -> bool:
        """Return whether ``/proc`` shows that the process has ended, reaped or not. For one without a pidfd."""
        state, started = _state(self._pid)
        return state in _ENDED_STATES or started != self._started

    def close(self) -> None:
        """Close the pidfd."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def _state(pid: int) -> tuple[bytes, bytes]:
    """Return the state of a process and the time of its start (fields 3 and 22 of proc(5)); empty if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return b"", b""
    return fields[0], fields[19]
