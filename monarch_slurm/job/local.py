"""This process as a host."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from monarch_slurm.job.base import BatchJob, JobState, JobTrait, Script, program_arguments
from monarch_slurm.job.folder import FOLDER_VARIABLE, JobFolder
from monarch_slurm.job.supervisor import BATCH_VARIABLE
from monarch_slurm.wire.task_limits import start_process


class LocalJob(JobTrait):
    """A job whose every host is this machine, run by the agent that this process has anyway.

    Args:
        hosts: names of the meshes; each is the one host `monarch_slurm.actor.this_host`.
    """

    def __init__(self, hosts: Sequence[str] = ("hosts",)) -> None:
        super().__init__()
        self._names = tuple(hosts)
        self._process: subprocess.Popen[bytes] | None = None
        self.log_dir: Path | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process of the client script.

        Raises:
            ValueError: no client script was given to `apply`.
        """
        if self._process is None:
            raise ValueError("this job has no client script, so it has no process")
        return self._process

    def _create(self, client_script: Script | None) -> None:
        if client_script is None:
            return
        arguments = program_arguments(client_script)
        logs = Path(".monarch/logs").absolute()
        logs.mkdir(parents=True, exist_ok=True)
        folder = JobFolder(Path(tempfile.mkdtemp(prefix="job_", dir=logs)))
        BatchJob(self).dump(str(folder.job_pickle))
        env = {**os.environ, BATCH_VARIABLE: "1", FOLDER_VARIABLE: str(folder.path)}
        self.log_dir = folder.path
        with open(folder.path / "stdout.log", "wb") as stdout, open(folder.path / "stderr.log", "wb") as stderr:
            self._process = start_process(
                "the client script",
                arguments,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def _state(self) -> JobState:
        from monarch_slurm.actor import this_host

        return JobState({name: this_host() for name in self._names})

    def can_run(self, spec: JobTrait) -> bool:
        """Return False: the hosts end with the process that has them."""
        return False

    def _kill(self) -> None:
        return

    def _is_running(self) -> bool:
        return True

    def _should_spawn_telemetry_worker_collector_actors(self) -> bool:
        return False

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_process": None}

    def __repr__(self) -> str:
        return f"LocalJob(hosts={self._names!r})"
