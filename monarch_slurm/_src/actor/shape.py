"""At home in `monarch_slurm.actor`."""

from monarch_slurm.actor import Extent, NDSlice, Shape, Slice
from monarch_slurm.actor.mesh_trait import MeshTrait

__all__ = ["Extent", "MeshTrait", "NDSlice", "Shape", "Slice"]
