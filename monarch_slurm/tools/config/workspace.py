"""At home in `monarch_slurm.actor.code_sync`."""

from monarch_slurm.actor.code_sync import ACTIVE_CONDA_ENV, CondaEnvironment, Workspace

__all__ = ["ACTIVE_CONDA_ENV", "CondaEnvironment", "Workspace"]
