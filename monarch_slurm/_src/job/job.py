"""At home in `monarch_slurm.job`."""

from monarch_slurm.job import BashActor, BatchJob, JobState, JobTrait, LocalJob, job_load, job_loads

__all__ = ["BashActor", "BatchJob", "JobState", "JobTrait", "LocalJob", "job_load", "job_loads"]
