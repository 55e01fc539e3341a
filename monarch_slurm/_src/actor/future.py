"""At home in `monarch_slurm.actor`."""

from monarch_slurm.actor import Future

__all__ = ["Future"]
