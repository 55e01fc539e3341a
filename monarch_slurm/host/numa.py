"""NUMA nodes of this host: which CPUs they have, and keeping a process's memory on them (set_mempolicy(2))."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence
from pathlib import Path

from monarch_slurm.gpu import parse_cpu_list

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_BIND = 2
_NODES = Path("/sys/devices/system/node")


def cpus_of(nodes: Sequence[int], folder: Path = _NODES) -> list[int]:
    """Return the CPUs of NUMA nodes.

    Raises:
        OSError: a node is not there.
    """
    return [cpu for node in nodes for cpu in parse_cpu_list((folder / f"node{node}" / "cpulist").read_text().strip())]


def keep_memory_on(nodes: Sequence[int]) -> None:
    """Let this process, and what it starts, take memory from these NUMA nodes only.

    Raises:
        OSError: a node is not there, or the kernel does not allow it.
    """
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise OSError(f"membind is not known on {platform.machine()}")
    mask = (ctypes.c_ulong * 16)()
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    for node in nodes:
        mask[node // bits] |= 1 << node % bits
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, _MPOL_BIND, mask, ctypes.c_ulong(16 * bits)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
