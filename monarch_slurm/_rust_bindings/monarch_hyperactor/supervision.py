"""At home in `monarch_slurm.actor`."""

from monarch_slurm.actor import MeshFailure, SupervisionError

__all__ = ["MeshFailure", "SupervisionError"]
