"""At home in `monarch_slurm.job`."""

from monarch_slurm.job import (
    DEFAULT_JOB_PATH,
    BashActor,
    BatchJob,
    JobState,
    JobTrait,
    LocalJob,
    exec_command,
    job_load,
    job_loads,
    load_current_job,
    set_current_job,
)

__all__ = [
    "DEFAULT_JOB_PATH",
    "BashActor",
    "BatchJob",
    "JobState",
    "JobTrait",
    "LocalJob",
    "exec_command",
    "job_load",
    "job_loads",
    "load_current_job",
    "set_current_job",
]
