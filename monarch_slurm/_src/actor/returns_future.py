"""At home in `monarch_slurm.actor`."""

from monarch_slurm.actor import returns_future

__all__ = ["returns_future"]
