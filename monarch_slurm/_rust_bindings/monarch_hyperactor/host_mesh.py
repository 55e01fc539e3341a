"""At home in `monarch_slurm.actor`."""

from monarch_slurm.actor import BootstrapCommand

__all__ = ["BootstrapCommand"]
