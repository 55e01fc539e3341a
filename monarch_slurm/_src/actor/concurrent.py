"""At home in `monarch_slurm.actor`."""

from monarch_slurm.actor import concurrent_endpoint

__all__ = ["concurrent_endpoint"]
