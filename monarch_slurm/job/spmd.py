"""Jobs of programs for torchrun: workers that such a program has started, and torchrun commands as jobs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from monarch_slurm.actor import attach_to_workers
from monarch_slurm.job.base import DEFAULT_JOB_PATH, JobState, JobTrait, Script
from monarch_slurm.job.errors import JobSpecError
from monarch_slurm.job.process import ProcessJob
from monarch_slurm.job.slurm import SlurmJob
from monarch_slurm.job.store_workers import StoreLike, workers_from_store
from monarch_slurm.spmd.torchrun import option_of, parse_torchrun, run_spmd

_MESH = "workers"
_LOCAL = ("local", "local_cwd")
_TORCHX_NAMES = {"time": "time_limit", "job_dir": "log_dir"}
"""Names that torchx has for what `SlurmJob` takes."""


class StoreJob(JobTrait):
    """The workers of a program that torchrun has started; `from_store` makes it. They end with the program's ranks."""

    def __init__(self, worker_addrs: list[str], name: str, key_file: os.PathLike[str] | str | None = None) -> None:
        super().__init__()
        self._workers = list(worker_addrs)
        self._name = name
        self._key_file = key_file

    @classmethod
    def from_store(
        cls,
        store: StoreLike,
        *,
        monarch_port: int = 0,
        name: str = "monarch_worker",
        transport: str = "ipc",
        rank: int | None = None,
        local_rank: int | None = None,
        world_size: int | None = None,
        local_world_size: int | None = None,
    ) -> StoreJob | None:
        """Start a worker on each node and return a job of all of them on rank 0, None on the others.

        To be called on every rank, with a store that all ranks share. `state` of the job has one mesh, ``name``.

        Args:
            monarch_port: port that workers listen on, with ``transport="tcp"``.
            transport: ``"ipc"``, if all ranks run on one machine, or ``"tcp"``.
            rank, local_rank, world_size, local_world_size: None takes what torchrun has put into the environment.

        Raises:
            RuntimeError: a rank or size is neither given nor in the environment.
            JobSpecError: sizes, transport and port do not make sense, or a worker cannot listen. It is a ValueError.
            NoKeyError: workers of several machines need a key, and none is named.
        """
        found = workers_from_store(
            store,
            monarch_port=monarch_port,
            name=name,
            transport=transport,
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            local_world_size=local_world_size,
        )
        return None if found is None else cls(found[0], name, found[1])

    def state(self, cached_path: str | None = None) -> JobState:
        """Attach to the workers. The job is remembered in no file unless one is named."""
        return super().state(cached_path)

    def _create(self, client_script: Script | None) -> None:
        if client_script is not None:
            raise JobSpecError("a StoreJob takes no client script: the program that has started its workers has them")

    def _state(self) -> JobState:
        hosts = attach_to_workers(private_key=self._key_file, workers=self._workers, name=self._name)
        return JobState({self._name: hosts})

    def can_run(self, spec: JobTrait) -> bool:
        """Return False: the workers end with the program."""
        return False

    def _is_running(self) -> bool:
        return self.active

    def _kill(self) -> None:
        """Leave the workers, which end with the ranks that have started them."""

    def __repr__(self) -> str:
        return f"StoreJob({self._workers!r}, {self._name!r})"


class SPMDJob(JobTrait):
    """A torchrun command and the job that it runs on, with the mesh ``workers``; `serve` makes it."""

    def __init__(self, job: JobTrait, command: Sequence[str]) -> None:
        super().__init__()
        self._job = job
        self._command = list(command)

    def run_spmd(self) -> None:
        """Run the command on all hosts, one rank per proc, and return when all are through.

        Raises:
            ActorError: a rank failed; the others are ended.
        """
        run_spmd(self.state().workers, self._command)

    def _create(self, client_script: Script | None) -> None:
        self._job.apply(client_script)

    def _state(self) -> JobState:
        return self._job._state()

    def can_run(self, spec: JobTrait) -> bool:
        """Return whether the job that it runs on can stand in for that of ``spec``."""
        return isinstance(spec, SPMDJob) and self._command == spec._command and self._job.can_run(spec._job)

    def _is_running(self) -> bool:
        return self._job._is_running()

    def _kill(self) -> None:
        self._job.kill()

    def _cleanup_log_context(self) -> dict[str, Any]:
        return {**super()._cleanup_log_context(), **self._job._cleanup_log_context()}

    def __repr__(self) -> str:
        return f"SPMDJob({self._job!r}, {self._command!r})"


def serve(appdef: Any, scheduler: str = "mast_conda", scheduler_cfg: Mapping[str, Any] | None = None) -> SPMDJob:
    """Apply a job for a torchrun command and return it; `SPMDJob.run_spmd` runs the command.

    Args:
        appdef: the command as a list, such as ``["torchrun", "--nproc-per-node=8", "train.py"]``, for one node; or an
            AppDef of torchx with one role, whose arguments are the command and whose ``num_replicas`` are the nodes.
            Its image and its other resources are not looked at: name them in ``scheduler_cfg``.
        scheduler: ``"slurm"``, or ``"local_cwd"`` for processes of this machine. The others of torchx are not here.
        scheduler_cfg: arguments of `SlurmJob`, such as ``partition``; torchx's ``time`` and ``job_dir`` are taken, too.

    Raises:
        NotImplementedError: the scheduler is another one.
        JobSpecError: the command or an argument makes no sense. It is a ValueError.
    """
    command, nodes = _command_of(appdef)
    parse_torchrun(command)
    options = {_TORCHX_NAMES.get(name, name): value for name, value in (scheduler_cfg or {}).items()}
    if scheduler == "slurm":
        try:
            job: JobTrait = SlurmJob({_MESH: nodes}, **options)
        except TypeError as error:
            raise JobSpecError(f"scheduler_cfg: {error}") from None
    elif scheduler in _LOCAL:
        job = ProcessJob({_MESH: nodes})
    else:
        raise NotImplementedError(f"scheduler {scheduler!r} is not here: 'slurm' or 'local_cwd' expected")
    if Path(DEFAULT_JOB_PATH).exists():
        warnings.warn(f"forgetting the job that {DEFAULT_JOB_PATH} remembers", stacklevel=2)
        Path(os.path.realpath(DEFAULT_JOB_PATH)).unlink()
    served = SPMDJob(job, command)
    served.apply()
    return served


def _command_of(appdef: Any) -> tuple[list[str], int]:
    """Return the command, and the number of nodes that it runs on."""
    if isinstance(appdef, list | tuple):
        if not appdef:
            raise JobSpecError("command cannot be empty")
        nodes = option_of(appdef, "--nnodes")
        if nodes not in (None, "1", "1:1"):
            raise JobSpecError(f"--nnodes={nodes}: a command as a list is for one node; use an AppDef for more")
        return list(appdef), 1
    try:
        roles = list(appdef.roles)
        if len(roles) != 1:
            raise JobSpecError(f"one role expected, not {len(roles)}")
        (role,) = roles
        command = list(role.args)
        if role.entrypoint.rpartition("/")[2] in ("torchrun", "python", "python3"):
            command = [role.entrypoint, *command]
        return command, int(role.num_replicas)
    except AttributeError as error:
        raise JobSpecError(f"a list or an AppDef of torchx expected, not {type(appdef).__name__} ({error})") from None
