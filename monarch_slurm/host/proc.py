"""A proc, seen from its host: what it is started with, and the entry that its agent's process hands over to."""

from __future__ import annotations

import importlib
from dataclasses import asdict, dataclass, field
from typing import Any

from monarch_slurm.wire import pack

PACKET_BYTES = 128 * 1024
"""Largest request of an agent to its zygote, or answer."""

ENTRY_MODULE = "monarch_slurm.actor.proc_main"
"""What procs run; the zygote imports it once for all. Only its name is known in this layer."""


@dataclass(frozen=True)
class ProcSpec:
    """What a new proc is told.

    Attributes:
        host: id of its host; ``host_name`` the name that people know.
        proc: its name on the host; ``mesh`` and ``rank`` say which member of which proc mesh it is.
        agent_socket: path of the agent's Unix socket.
        entry: ``package.module:function`` that is called with this spec and returns the exit code.
        env: environment variables to set, or with None to remove.
        sys_path: folders that must be importable from.
        cwd: folder to change to, if it exists on this host.
        cpus: CPUs to run on; empty leaves all.
        settings: settings of the process that asked for the proc.
    """

    host: str
    host_name: str
    proc: str
    mesh: str
    rank: int
    agent_socket: str
    entry: str
    env: dict[str, str | None] = field(default_factory=dict)
    sys_path: list[str] = field(default_factory=list)
    cwd: str = ""
    cpus: list[int] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)


def pack_request(spec: ProcSpec, last: bool) -> bytes:
    """Return the packet that asks a zygote for a proc; ``last`` makes it fork all that it was asked for."""
    return pack({"spec": asdict(spec), "last": last})


def run_proc(spec: ProcSpec) -> int:
    """Hand over to ``spec.entry`` and return its exit code."""
    module, _, function = spec.entry.partition(":")
    code = getattr(importlib.import_module(module), function)(spec)
    return int(code or 0)
