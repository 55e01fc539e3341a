"""At home in `monarch_slurm.spmd`."""

from monarch_slurm.spmd import SPMDActor

__all__ = ["SPMDActor"]
