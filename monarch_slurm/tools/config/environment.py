"""At home in `monarch_slurm.actor.code_sync`."""

from monarch_slurm.actor.code_sync import CondaEnvironment

__all__ = ["CondaEnvironment"]
