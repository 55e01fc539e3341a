"""Runs a command to which some system calls answer with an error, as on an old kernel or in a container.

``python without_system_calls.py ERRNO NAME,NAME,... COMMAND...``
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

NUMBERS = {
    "x86_64": {
        "pidfd_open": 434, "pidfd_send_signal": 424, "pidfd_getfd": 438, "close_range": 436, "memfd_create": 319,
        "process_vm_readv": 310, "process_vm_writev": 311, "eventfd2": 290, "set_mempolicy": 238, "clone3": 435,
        "io_uring_setup": 425,
    },
    "aarch64": {
        "pidfd_open": 434, "pidfd_send_signal": 424, "pidfd_getfd": 438, "close_range": 436, "memfd_create": 279,
        "process_vm_readv": 270, "process_vm_writev": 271, "eventfd2": 19, "set_mempolicy": 237, "clone3": 435,
        "io_uring_setup": 425,
    },
}  # fmt: skip
"""System calls by architecture, from the kernel's tables."""

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2


def refuse(error: int, names: list[str]) -> None:
    """Have the kernel answer these calls of this process, and of all that it starts, with ``error``."""
    machine = platform.machine()
    program = [
        (_LOAD, 0, 0, 4),
        (_JUMP_IF_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, 0),
    ]
    for name in names:
        program += [(_JUMP_IF_EQUAL, 0, 1, NUMBERS[machine][name]), (_RETURN, 0, 0, _ERRNO | error)]
    program.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _FILTER, ctypes.c_void_p(ctypes.addressof(head)), 0, 0),
    ):
        if libc.prctl(*call) != 0:
            raise OSError(ctypes.get_errno(), "seccomp filters are not allowed here")


if __name__ == "__main__":
    refuse(int(sys.argv[1]), sys.argv[2].split(","))
    os.execvp(sys.argv[3], sys.argv[3:])
