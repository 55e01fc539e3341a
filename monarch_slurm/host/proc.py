"""A proc, seen from its host: what it is started with, and the entry that its agent's process hands over to."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from monarch_slurm.host import kernel
from monarch_slurm.inherited import settle_inheritance
from monarch_slurm.interpreter import module_arguments, python_environment
from monarch_slurm.wire import pack, unpack

PACKET_BYTES = 128 * 1024
"""Largest request of an agent to its zygote, or answer."""

ENTRY_MODULE = "monarch_slurm.actor.proc_main"
"""What procs run; the zygote imports it once for all. Only its name is known in this layer."""


ENTRY_ARGUMENTS = tuple(module_arguments("monarch_slurm.host.proc"))
"""With these a Python interpreter runs the proc that `become_command` has left to it."""

_SPEC_VARIABLE = "MONARCH_SLURM_PROC_SPEC"


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
        cpu_nodes: NUMA nodes whose CPUs to run on, unless ``cpus`` says; ``memory_nodes`` those to take memory from.
        command: program, its name for itself and its arguments, which are to run the proc; empty for the zygote's fork.
        inherit_env: keep the agent's environment; else only what ``env`` says.
        settings: settings of the process that asked for the proc.
        incarnation: how often procs of its mesh were started again before.
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
    cpu_nodes: list[int] = field(default_factory=list)
    memory_nodes: list[int] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    inherit_env: bool = True
    incarnation: int = 0


def pack_request(spec: ProcSpec, last: bool) -> bytes:
    """Return the packet that asks a zygote for a proc; ``last`` makes it fork all that it was asked for."""
    return pack({"spec": asdict(spec), "last": last})


def become_command(spec: ProcSpec) -> NoReturn:
    """Replace this process by ``spec.command``, in which `main` runs.

    Raises:
        OSError: it cannot be run.
    """
    fd = os.memfd_create("proc", 0)
    os.write(fd, pack(asdict(spec)))
    os.lseek(fd, 0, os.SEEK_SET)
    program, *arguments = spec.command
    environment = python_environment({**os.environ, _SPEC_VARIABLE: str(fd)}, find_package=True)
    try:
        os.execvpe(program, arguments, environment)  # noqa: S606 - the user's own command
    except OSError as error:
        raise OSError(
            error.errno, f"host {spec.host_name} cannot run the bootstrap command {program!r}: {error.strerror}"
        ) from None


def set_proc_title(spec: ProcSpec) -> None:
    """Have ps and top show which proc this process is."""
    kernel.set_title(
        f"monarch_slurm proc {spec.mesh} rank {spec.rank} on {spec.host_name}", f"ms-{spec.rank}-{spec.mesh}"
    )


def main() -> int:
    """Run the proc that `become_command` was asked for."""
    settle_inheritance()
    with os.fdopen(int(os.environ.pop(_SPEC_VARIABLE)), "rb") as file:
        spec = ProcSpec(**unpack(file.read()))
    set_proc_title(spec)
    for path in reversed(spec.sys_path):
        if path not in sys.path:
            sys.path.insert(0, path)
    return run_proc(spec)


def run_proc(spec: ProcSpec) -> int:
    """Hand over to ``spec.entry`` and return its exit code."""
    module, _, function = spec.entry.partition(":")
    code = getattr(importlib.import_module(module), function)(spec)
    return int(code or 0)
