"""At home in `monarch_slurm.job`."""

from monarch_slurm.job import SlurmJob

__all__ = ["SlurmJob"]
