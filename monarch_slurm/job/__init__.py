"""Where hosts come from: this process, child processes, Slurm.

- `base`: what every job can do: apply, state, kill, dump
- `local`, `process`, `slurm`: the kinds of jobs; `whole`: spares in place of hosts that are not fit
- `more_nodes`, `requested`: nodes that are asked for in the places of lost ones; `sick`: nodes to leave out
- `request`, `slurm_options`, `container`, `share`, `submission`: what Slurm is asked for
- `batch`, `steps`, `node`, `supervisor`: what then runs on the head node and on each node
- `launch`, `templates`: batch scripts that a person writes
- `head`, `head_lock`: what if the head is lost, or there are two
- `notice`, `requeue`: what if Slurm is about to end the job
- `status`, `follow`, `head_news`, `logs`, `log_reader`, `locate`, `diagnosis`: what became of it
- `node_states`, `health`: which nodes Slurm can give, and whether they are fit
- `allocation`, `address`, `nodelist`: the allocation around this process
- `checks`, `services`: what kinds of jobs share
- `commands`, `bash_actor`, `host_shell`, `port_forwarder`: commands, terminals and tunnels on a job's hosts
- `service_ids`: workers that are known by an id
- `current`: the job that commands in a folder are about
- `folder`, `processes`: what a job keeps on disk and runs on a machine
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from monarch_slurm.job.address import find_address
from monarch_slurm.job.allocation import AllocationError, SlurmAllocation
from monarch_slurm.job.base import DEFAULT_JOB_PATH, BatchJob, JobState, JobTrait, job_load, job_loads
from monarch_slurm.job.container import Container
from monarch_slurm.job.current import load_current_job, set_current_job
from monarch_slurm.job.errors import (
    AddressError,
    HostsTakenError,
    HostStartError,
    JobEndedError,
    JobError,
    JobFolderError,
    JobNotFoundError,
    JobSpecError,
    JobStartTimeoutError,
    NodeListError,
    NoSlurmError,
    PreflightError,
    SlurmUnreachableError,
    SubmitError,
    UnfitHostError,
)
from monarch_slurm.job.local import LocalJob
from monarch_slurm.job.notice import SAVED, save_on_notice
from monarch_slurm.job.process import LostHostsError, ProcessJob, hosts_from_config
from monarch_slurm.job.request import NodeSpec
from monarch_slurm.job.slurm import SlurmJob, follow
from monarch_slurm.job.status import JobStatus, Phase
from monarch_slurm.job.telemetry import MeshAdminConfig, TelemetryConfig

if TYPE_CHECKING:
    from monarch_slurm.job.bash_actor import BashActor
    from monarch_slurm.job.commands import exec_command
    from monarch_slurm.job.host_shell import shell
    from monarch_slurm.job.port_forwarder import PortForwarder
    from monarch_slurm.job.service_ids import (
        SERVICE_PROC_IDS_ENV,
        SERVICE_PROC_RANK_ENV,
        deserialize_service_proc_ids,
        new_service_proc_id,
        ranked_service_proc_id_from_env,
        serialize_service_proc_ids,
        service_proc_addr,
        service_proc_addrs,
    )

__all__ = [
    "DEFAULT_JOB_PATH",
    "SAVED",
    "SERVICE_PROC_IDS_ENV",
    "SERVICE_PROC_RANK_ENV",
    "AddressError",
    "AllocationError",
    "BashActor",
    "BatchJob",
    "Container",
    "HostStartError",
    "HostsTakenError",
    "JobEndedError",
    "JobError",
    "JobFolderError",
    "JobNotFoundError",
    "JobSpecError",
    "JobStartTimeoutError",
    "JobState",
    "JobStatus",
    "JobTrait",
    "LocalJob",
    "LostHostsError",
    "MeshAdminConfig",
    "NoSlurmError",
    "NodeListError",
    "NodeSpec",
    "Phase",
    "PortForwarder",
    "PreflightError",
    "ProcessJob",
    "SlurmAllocation",
    "SlurmJob",
    "SlurmUnreachableError",
    "SubmitError",
    "TelemetryConfig",
    "UnfitHostError",
    "deserialize_service_proc_ids",
    "exec_command",
    "find_address",
    "follow",
    "hosts_from_config",
    "job_load",
    "job_loads",
    "load_current_job",
    "new_service_proc_id",
    "ranked_service_proc_id_from_env",
    "save_on_notice",
    "serialize_service_proc_ids",
    "service_proc_addr",
    "service_proc_addrs",
    "set_current_job",
    "shell",
]

_WITH_ACTORS = {
    "BashActor": "bash_actor",
    "PortForwarder": "port_forwarder",
    "SERVICE_PROC_IDS_ENV": "service_ids",
    "SERVICE_PROC_RANK_ENV": "service_ids",
    "deserialize_service_proc_ids": "service_ids",
    "exec_command": "commands",
    "new_service_proc_id": "service_ids",
    "ranked_service_proc_id_from_env": "service_ids",
    "serialize_service_proc_ids": "service_ids",
    "service_proc_addr": "service_ids",
    "service_proc_addrs": "service_ids",
    "shell": "host_shell",
}
"""Names whose modules define actors: imported when they are asked for, since the command line has no use for them."""


def __getattr__(name: str) -> Any:
    if name in _WITH_ACTORS:
        return getattr(importlib.import_module(f"{__name__}.{_WITH_ACTORS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
