"""Where hosts come from: this process, child processes, Slurm.

- `base`: what every job can do: apply, state, kill, dump
- `local`, `process`, `slurm`: the kinds of jobs
- `request`, `container`, `submission`: what Slurm is asked for
- `batch`, `steps`, `node`, `supervisor`: what then runs on the head node and on each node
- `head`: what if the head is lost
- `status`, `follow`, `diagnosis`: what became of it
- `allocation`, `address`, `nodelist`: the allocation around this process
- `folder`, `processes`: what a job keeps on disk and runs on a machine
"""

from monarch_slurm.job.address import find_address
from monarch_slurm.job.allocation import AllocationError, SlurmAllocation
from monarch_slurm.job.base import DEFAULT_JOB_PATH, BatchJob, JobState, JobTrait, job_load, job_loads
from monarch_slurm.job.container import Container
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
)
from monarch_slurm.job.local import LocalJob
from monarch_slurm.job.process import LostHostsError, ProcessJob
from monarch_slurm.job.request import NodeSpec
from monarch_slurm.job.slurm import SlurmJob, follow
from monarch_slurm.job.status import JobStatus, Phase

__all__ = [
    "DEFAULT_JOB_PATH",
    "AddressError",
    "AllocationError",
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
    "NoSlurmError",
    "NodeListError",
    "NodeSpec",
    "Phase",
    "PreflightError",
    "ProcessJob",
    "SlurmAllocation",
    "SlurmJob",
    "SlurmUnreachableError",
    "SubmitError",
    "find_address",
    "follow",
    "job_load",
    "job_loads",
]
