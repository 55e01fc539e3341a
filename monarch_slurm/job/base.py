"""What every kind of job has in common: apply it, use its hosts, remember it in a file, kill it.

A job is a description of named host meshes. `JobTrait.apply` makes it real, `JobTrait.state` connects to its hosts.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import shlex
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from monarch_slurm.job.errors import JobError, JobSpecError
from monarch_slurm.job.folder import FOLDER_VARIABLE, JobFolder
from monarch_slurm.job.services import Services
from monarch_slurm.job.supervisor import BATCH_VARIABLE
from monarch_slurm.owned_files import LARGE_BYTES, FileRefusedError, followed, make_folders, read_owned, write_whole

if TYPE_CHECKING:
    from monarch_slurm.actor import HostMesh

logger = logging.getLogger(__name__)

DEFAULT_JOB_PATH = ".monarch/job_state.pkl"
"""Where `JobTrait.state` remembers a job, relative to the working directory."""


Script = Sequence[str] | str
"""A program: its arguments, a command line, or the path of a ``.py`` file."""


class JobState:
    """The hosts of a job, once connected: each mesh is an attribute of its name.

    The other arguments belong to services that a kind of job of your own may have; no job here has them.
    """

    def __init__(
        self,
        hosts: Mapping[str, HostMesh],
        query_engine: Any = None,
        query_engine_client: Any = None,
        telemetry_url: str | None = None,
        dashboard_url: str | None = None,
        admin_url: str | None = None,
    ) -> None:
        self._hosts = dict(hosts)
        self.query_engine = query_engine
        self.query_engine_client = query_engine_client
        self.telemetry_url = telemetry_url
        self.dashboard_url = dashboard_url
        self.admin_url = admin_url

    def __getattr__(self, name: str) -> HostMesh:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._hosts[name]
        except KeyError:
            raise AttributeError(
                f"this job has no hosts named {name!r}; there are: {', '.join(self._hosts) or 'none'}"
            ) from None

    def again(self) -> JobState:
        """Return a further state of the same hosts: `HostMesh.stop` of one leaves the procs of the other alone."""
        meshes = {name: mesh._again() for name, mesh in self._hosts.items()}
        return JobState(
            meshes,
            self.query_engine,
            self.query_engine_client,
            self.telemetry_url,
            self.dashboard_url,
            self.admin_url,
        )

    def shutdown(self) -> None:
        """Tell the agents of all hosts to end, so that their end is no failure."""
        for mesh in self._hosts.values():
            if not mesh._handle.ended:
                mesh.shutdown()

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._hosts]

    def __repr__(self) -> str:
        return f"JobState({', '.join(f'{name}={mesh!r}' for name, mesh in self._hosts.items())})"


@dataclass(frozen=True)
class _CachedRunning:
    """The status of a job whose hosts are those of another job object, found in a file."""

    job: JobTrait


class JobTrait(Services, ABC):
    """A job: named meshes of hosts, and how to get them.

    A subclass gives `_create`, `_state`, `can_run` and `_kill`, and leaves ``_status`` alone.
    """

    def __init__(self) -> None:
        self._status: str | _CachedRunning = "not_running"
        self._apply_id: str | None = None

    @abstractmethod
    def _create(self, client_script: Script | None) -> None:
        """Make the hosts; with ``client_script``, run it as their controller."""

    @abstractmethod
    def _state(self) -> JobState:
        """Connect to the hosts, waiting until they are there."""

    @abstractmethod
    def can_run(self, spec: JobTrait) -> bool:
        """Return whether this job, as it is now, can stand in for ``spec``."""

    @abstractmethod
    def _kill(self) -> None:
        """End the hosts."""

    @property
    def apply_id(self) -> str | None:
        """An id that each `apply` makes anew; None while the job is not active."""
        return self._apply_id if self.active else None

    @property
    def active(self) -> bool:
        """Whether the job has been applied and not been killed by this object."""
        return self._status != "not_running"

    @property
    def _running(self) -> JobTrait | None:
        """The job that really has the hosts: this one, or one found in a file."""
        if isinstance(self._status, _CachedRunning):
            return self._status.job
        return self if self._status == "running" else None

    def apply(self, client_script: Script | None = None) -> None:
        """Make the hosts, unless they are there already.

        Args:
            client_script: program that is to be the controller, as a list of arguments, as one command line, or as the
                path of a ``.py`` file. It runs where the hosts are, and `state` in it returns this job's hosts.
        """
        if self._running is not None:
            return
        self._create(client_script)
        self._mark_applied()

    def _mark_applied(self) -> None:
        self._apply_id = str(uuid.uuid4())
        self._status = "running"

    def state(self, cached_path: str | None = DEFAULT_JOB_PATH) -> JobState:
        """Connect to the hosts and return them; make them first if need be.

        Inside of a batch job, its hosts are returned. Otherwise a job remembered in ``cached_path`` is used if it still
        runs and suffices; if it runs and does not suffice it is killed. A new job is remembered there.

        Args:
            cached_path: file that remembers the job from one program to the next; None for none.
        """
        if self._running is not None or self._use_cached(cached_path):
            assert self._running is not None
            return self._running._state()
        self.apply()
        state = self._state()
        if cached_path is not None:
            self.dump(cached_path)
        return state

    def ensure_applied(self, cached_path: str = DEFAULT_JOB_PATH) -> bool:
        """Make the hosts for a later program, unless this job or one remembered in ``cached_path`` has them; connect
        to none. Return whether they were made.
        """
        if self._running is not None or self._use_cached(cached_path):
            return False
        self.apply()
        self.dump(cached_path)
        return True

    def _use_cached(self, path: str | None) -> bool:
        """Use the job that is remembered in ``path``, if it runs and suffices; else end it and forget it."""
        cached = _batch_job() or _load_cached(path)
        if cached is not None and cached._running is not None:
            cached._running._rebind_connection_inputs(self)
            if cached.can_run(self):
                self._status = _CachedRunning(cached._running)
                self._apply_id = cached._apply_id
                return True
            cached._discard()
        if path is not None:
            Path(os.path.realpath(path)).unlink(missing_ok=True)
        return False

    def kill(self) -> None:
        """End the job and its hosts, wherever they are."""
        running = self._running
        self._status = "not_running"
        if running is not None:
            running._kill()

    # ---- what a kind of job may also define

    def _is_running(self) -> bool:
        """Return whether this applied job still has its hosts, without connecting to them."""
        return self.can_run(self)

    def _rebind_connection_inputs(self, spec: JobTrait) -> None:
        """Take from ``spec`` what only the program of today knows, such as credentials or the path of a key file.

        Called on a remembered job before it is asked whether it `can_run` the ``spec``.
        """

    def _cleanup_log_context(self) -> dict[str, Any]:
        """Return what a person needs to end the hosts by hand; for the log, so without secrets."""
        return {"job_type": type(self).__name__}

    def _prepare_client_gateway(self) -> None:
        """Find out which worker leads to the others, and `_attach_client` to it: for `_state` to call."""

    def _sidecar_attach_to(self) -> str | None:
        """Return the worker that leads to the others, if there is one."""
        from monarch_slurm.actor.workers import attached_to

        return attached_to()

    def _requires_sidecar_gateway(self) -> bool:
        """Return whether other processes of this machine need that worker, too. No job here starts any."""
        return False

    def _should_spawn_telemetry_worker_collector_actors(self) -> bool:
        """Return whether telemetry would be collected on each host. No job here has telemetry."""
        return True

    def _attach_client(self, attach_to: str | None) -> None:
        """For kinds of jobs whose hosts are not on this program's network: reach them through the worker at that
        address; None does nothing.

        Raises:
            RuntimeError: this program has hosts already, or reaches them through another worker.
            AttachError: the worker cannot be had.
        """
        from monarch_slurm.actor import attach

        if attach_to is not None:
            attach(attach_to)

    def _discard(self) -> None:
        """Kill a remembered job that is no longer wanted; one that cannot be killed is left to its time limit."""
        try:
            self.kill()
        except Exception as error:  # of whatever kind: a job of the user's own may raise anything
            logger.warning("the remembered job %r could not be killed: %s (%s)", self, error, self._log_context())

    def _log_context(self) -> dict[str, Any]:
        try:
            return self._cleanup_log_context()
        except Exception as error:  # as above
            return {"job_type": type(self).__name__, "unknown": repr(error)}

    def dumps(self) -> bytes:
        """Return the job as bytes for `job_loads`."""
        return bytes(cloudpickle.dumps(self))

    def dump(self, filename: str) -> None:
        """Write the job for `job_load`, with its folders; a symbolic link of this user's is followed.

        Raises:
            JobError: the file cannot be written.
        """
        try:
            path = followed(Path(filename))
            make_folders(path.parent, 0o755)
            write_whole(path, self.dumps())
        except FileRefusedError as error:
            raise JobError(f"cannot remember the job: {error}") from None
        except OSError as error:
            raise JobError(f"cannot remember the job in {path}: {error.strerror}") from None


class BatchJob(JobTrait):
    """A job seen by the program that runs inside of it: its hosts are there, whatever that program asks for."""

    def __init__(self, job: JobTrait) -> None:
        super().__init__()
        self._job = job
        self._status = "running"
        self._ends_with_process = False

    def _create(self, client_script: Script | None = None) -> None:
        raise JobError("a program inside of a job cannot apply that job again")

    def _state(self) -> JobState:
        return self._job._state()

    def can_run(self, spec: JobTrait) -> bool:
        """Return whether this process runs inside of the job. If so the job ends with it."""
        inside = BATCH_VARIABLE in os.environ
        if inside and not self._ends_with_process:
            self._ends_with_process = True
            atexit.register(self._kill)
        return inside

    def _kill(self) -> None:
        self._job._kill()

    def _is_running(self) -> bool:
        return self._job._is_running()

    def _rebind_connection_inputs(self, spec: JobTrait) -> None:
        self._job._rebind_connection_inputs(spec)

    def _cleanup_log_context(self) -> dict[str, Any]:
        return self._job._cleanup_log_context()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._job, name)

    def __repr__(self) -> str:
        return f"BatchJob({self._job!r})"


_UNPICKLING = (
    pickle.UnpicklingError, EOFError, ImportError, AttributeError, TypeError, ValueError, LookupError, ArithmeticError,
    AssertionError, MemoryError, RecursionError, RuntimeError,
)  # fmt: skip
"""What bytes that are no pickle, or one of another version, may raise."""


def job_loads(data: bytes) -> JobTrait:
    """Return the job that `JobTrait.dumps` wrote. This is unpickling: only for bytes from someone you trust.

    Raises:
        JobError: the bytes are no job, or one of another version.
    """
    try:
        job = pickle.loads(data)
    except _UNPICKLING as error:
        raise JobError(f"cannot read the remembered job: {error or type(error).__name__}") from None
    if not isinstance(job, JobTrait):
        raise JobError(f"not a job but a {type(job).__name__}")
    return job


def job_load(filename: str = DEFAULT_JOB_PATH) -> JobTrait:
    """Return the job that `JobTrait.dump` wrote to ``filename``; inside of a batch job, by default, that job.

    Raises:
        FileNotFoundError: there is no such file.
        JobError: it belongs to somebody else, others may have written it, or it holds no job.
    """
    job = _batch_job() if filename == DEFAULT_JOB_PATH else None
    if job is not None:
        return job
    try:
        data = read_owned(Path(filename), "to load it", limit=LARGE_BYTES)
    except FileRefusedError as error:
        raise JobError(str(error)) from None
    try:
        return job_loads(data)
    except JobError as error:
        raise JobError(f"{filename}: {error}; remove it if you do not need it") from None


def _load_cached(path: str | None) -> JobTrait | None:
    try:
        return None if path is None else job_load(path)
    except FileNotFoundError:
        return None


def _batch_job() -> JobTrait | None:
    """Return the job that this process is the controller of by way of `JobTrait.apply`; None if it is not."""
    if BATCH_VARIABLE not in os.environ or FOLDER_VARIABLE not in os.environ:
        return None
    return job_load(str(JobFolder(Path(os.environ[FOLDER_VARIABLE])).job_pickle))


def program_arguments(script: Script, python: str | None = None) -> list[str]:
    """Return the command line that ``script`` stands for; Python is put before a ``.py`` file.

    Raises:
        JobSpecError: it is empty, or its quotes do not match.
    """
    try:
        arguments = shlex.split(script) if isinstance(script, str) else list(script)
    except ValueError as error:
        raise JobSpecError(f"client script {script!r}: {error}") from None
    if not arguments:
        raise JobSpecError("the client script is empty")
    if arguments[0].endswith(".py"):
        arguments = [*(shlex.split(python) if python else [sys.executable]), *arguments]
    return arguments
