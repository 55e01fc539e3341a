"""Hosts that are processes of this machine: what a cluster looks like to a program, without a cluster."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from monarch_slurm.host.places import OnLost
from monarch_slurm.interpreter import module_command, python_environment
from monarch_slurm.job.base import JobState, JobTrait, Script
from monarch_slurm.job.checks import check_meshes, check_spares
from monarch_slurm.job.errors import HostsTakenError, JobError
from monarch_slurm.job.folder import FOLDER_VARIABLE, JobFolder, tail
from monarch_slurm.job.processes import end_processes, find_processes
from monarch_slurm.job.supervisor import CLIENT_WAIT
from monarch_slurm.owned_files import append_owned
from monarch_slurm.wire.task_limits import start_process

if TYPE_CHECKING:
    from monarch_slurm.actor import HostMesh
    from monarch_slurm.actor.stand_ins import Pool
    from monarch_slurm.host import HostDown

KILL_GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL for the processes of a host."""


class LostHostsError(JobError, RuntimeError):
    """Apply the job again: processes that were its hosts have ended."""


class ProcessJob(JobTrait):
    """A job whose hosts are child processes, each with a session and a host agent of its own.

    The hosts end with their controller, which is the process that calls `state`. A job that was only applied can be
    dumped for another program to use, which must come for it within `CLIENT_WAIT` seconds.

    Args:
        meshes: name and number of hosts of each mesh.
        env: variables to set in the hosts' environment.
        spares: further hosts, of which one takes the place of a host that is lost.
        on_lost: what if no spare is left, as `SlurmJob` has it; ``"request"`` starts another process.
    """

    def __init__(
        self,
        meshes: dict[str, int],
        env: dict[str, str] | None = None,
        *,
        spares: int = 0,
        on_lost: OnLost = "shrink",
    ) -> None:
        super().__init__()
        self._meshes = check_meshes(meshes)
        self._env = dict(env or {})
        self._spares, self._on_lost = check_spares(spares, on_lost)
        self._started = 0
        self._folder: JobFolder | None = None
        self._agents: dict[str, tuple[int, float]] = {}  # host: pid and start time
        self._children: list[subprocess.Popen[bytes]] = []
        self._dumped = False
        self._connected: JobState | None = None
        self._pool: Pool | None = None

    def _create(self, client_script: Script | None) -> None:
        if client_script is not None:
            raise RuntimeError("a ProcessJob takes no client script: run the program, and have it call state()")
        # Not a name that runtime_dir.py could take for a folder of sockets whose process is gone.
        self._folder = folder = JobFolder(Path(tempfile.mkdtemp(prefix=f"msjob-{os.getuid()}-")))
        folder.logs.mkdir(mode=0o700)
        runtime = folder.path / "run"
        runtime.mkdir(mode=0o700)
        for name in [*self._host_names(), *(self._spare_name() for _ in range(self._spares))]:
            self._start_host(folder, name)
        atexit.register(self._clean_up, os.getpid())

    def _start_host(self, folder: JobFolder, name: str) -> None:
        env = {**os.environ, "MONARCH_SLURM_MESH_ORPHAN_TIMEOUT": str(CLIENT_WAIT), **self._env}
        env |= {FOLDER_VARIABLE: str(folder.path), "MONARCH_SLURM_RUNTIME_DIR": str(folder.path / "run")}
        command = module_command("monarch_slurm.host", "--folder", str(folder.path), "--name", name)
        with open(append_owned(folder.host_log(name)), "ab") as log:
            process = start_process(
                f"host {name}",
                command,
                env=python_environment(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._children.append(process)
        self._agents[name] = (process.pid, psutil.Process(process.pid).create_time())

    def _host_names(self) -> Iterator[str]:
        for mesh, size in self._meshes.items():
            for index in range(size):
                yield f"{mesh}-{index}"

    def _spare_name(self) -> str:
        self._started += 1
        return f"spare.{self._started - 1}"  # no mesh can be called so

    def _state(self) -> JobState:
        if self._connected is not None:
            return self._connected.again()
        assert self._folder is not None
        from monarch_slurm.config import settings
        from monarch_slurm.controller import gather_hosts, keep_whole, publish

        self._check_agents()
        if self._folder.controller_file.exists():
            raise HostsTakenError("the hosts of this job already serve another program; apply a job of your own")
        publish(self._folder.path, address="127.0.0.1")
        meshes = {}
        for mesh, size in self._meshes.items():
            names = [f"{mesh}-{index}" for index in range(size)]
            meshes[mesh] = gather_hosts(names, timeout=settings().host_join_timeout)
        self._connected = JobState(meshes)
        spares = sorted(self._agents.keys() - set(self._host_names()))
        self._pool = keep_whole(meshes.values(), spares, self._on_lost, self._request_host)
        return self._connected.again()

    def _request_host(self, down: HostDown, place: str) -> None:
        """Start one more process, in the place of one that is lost."""
        name = self._spare_name()
        if self._folder is not None and self._pool is not None:
            self._pool.names.add(name)
            self._start_host(self._folder, name)

    def _check_agents(self) -> None:
        assert self._folder is not None
        lost = [name for name, agent in self._agents.items() if not _alive(*agent)]
        if lost:
            said = tail(self._folder.host_log(lost[0]))
            quoted = f"; {lost[0]} said last:\n{said}" if said else ""
            raise LostHostsError(f"lost connection to worker processes: {', '.join(lost)} ended{quoted}")

    def can_run(self, spec: JobTrait) -> bool:
        """Return whether ``spec`` asks for the same and the hosts live and have not had a controller yet."""
        return (
            isinstance(spec, ProcessJob)
            and (spec._meshes, spec._env, spec._spares, spec._on_lost)
            == (self._meshes, self._env, self._spares, self._on_lost)
            and self._folder is not None
            and not self._folder.controller_file.exists()
            and all(_alive(*agent) for agent in self._agents.values())
        )

    def _kill(self) -> None:
        if self._connected is not None:
            self._connected.shutdown()
        self._end()

    def _end(self) -> None:
        folder, self._folder = self._folder, None
        if folder is None:
            return
        end_processes(lambda: find_processes(folder.path), KILL_GRACE)
        for child in self._children:
            child.wait()
        self._children.clear()
        shutil.rmtree(folder.path, ignore_errors=True)
        self._agents.clear()
        self._connected = None

    def _clean_up(self, creator: int) -> None:
        """Kill the hosts when the program ends, unless it has left them to another one."""
        if os.getpid() != creator or (self._dumped and self._connected is None):
            return
        if self._connected is not None:
            from monarch_slurm.actor import shutdown_context

            shutdown_context()  # the client does so itself, but perhaps only after this
        self._end()

    def dumps(self) -> bytes:  # noqa: D102
        self._dumped = True
        return super().dumps()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_connected": None, "_children": [], "_pool": None}

    def __repr__(self) -> str:
        return f"ProcessJob({self._meshes!r}{', active' if self.active else ''})"


def hosts_from_config(name: str) -> HostMesh:
    """Return two hosts that are processes of this machine, for examples that name a mesh of a configuration.

    They end with this program.
    """
    return ProcessJob({"hosts": 2}).state(cached_path=None).hosts


def _alive(pid: int, started: float) -> bool:
    try:
        process = psutil.Process(pid)
        return bool(process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
