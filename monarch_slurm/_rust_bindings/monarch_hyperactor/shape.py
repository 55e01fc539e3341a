"""At home in `monarch_slurm.actor`."""

from monarch_slurm.actor import Extent, Point, Shape, Slice

Region = Shape
"""A shape says where its ranks are, too."""

__all__ = ["Extent", "Point", "Region", "Shape", "Slice"]
