"""At home in `monarch_slurm.actor`."""

from monarch_slurm.actor import NDSlice, Shape
from monarch_slurm.actor.mesh_trait import MeshTrait

__all__ = ["MeshTrait", "NDSlice", "Shape"]
