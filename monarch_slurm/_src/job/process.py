"""At home in `monarch_slurm.job`."""

from monarch_slurm.job import ProcessJob

__all__ = ["ProcessJob"]
