"""The values that a mesh answered with, by place."""

from __future__ import annotations

import pprint
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from monarch_slurm.actor.mesh_trait import ShapedMesh
from monarch_slurm.actor.ndslice import OutOfRangeError
from monarch_slurm.actor.shape import Point, Shape

R = TypeVar("R")


class ValueMesh(ShapedMesh, Generic[R]):
    """One value per rank of a shape.

    Args:
        shape: where the values belong.
        values: one for each rank of ``shape``, in row-major order.
    """

    def __init__(self, shape: Shape, values: list[R]) -> None:
        if len(values) != len(shape):
            raise ValueError(f"{len(values)} values for a shape of {len(shape)}")
        self._value_shape = shape
        self._values = values

    @staticmethod
    def from_indexed(shape: Shape, pairs: Iterable[tuple[int, Any]]) -> ValueMesh[Any]:
        """Return the mesh with the given (rank, value) pairs; of two for one rank the later counts.

        Raises:
            ValueError: a rank of ``shape`` has no value, or a pair is for a rank that ``shape`` does not have.
        """
        found = dict(pairs)
        missing = [rank for rank in range(len(shape)) if rank not in found]
        if missing:
            raise ValueError(f"no value for ranks {missing}")
        if extra := sorted(found.keys() - range(len(shape))):
            raise ValueError(f"values for ranks {extra}, which a shape of {len(shape)} does not have")
        return ValueMesh(shape, [found[rank] for rank in range(len(shape))])

    @property
    def _shape(self) -> Shape:
        return self._value_shape

    def _new_with_shape(self, shape: Shape) -> ValueMesh[R]:
        index = self._value_shape.ndslice.index
        return ValueMesh(shape.extent.region, [self._values[index(rank)] for rank in shape.ndslice])

    def values(self) -> list[R]:
        """Return the values in row-major order."""
        return list(self._values)

    def items(self) -> Iterator[tuple[Point, R]]:
        """Iterate over (place, value) pairs in row-major order."""
        extent = self.extent
        return ((Point(rank, extent), value) for rank, value in enumerate(self._values))

    def __iter__(self) -> Iterator[tuple[Point, R]]:
        return self.items()

    def get(self, rank: int) -> R:
        """Return the value of ``rank``.

        Raises:
            OutOfRangeError: there is no such rank.
        """
        if not 0 <= rank < len(self._values):
            raise OutOfRangeError(f"rank {rank} not in current shape")
        return self._values[rank]

    def item(self, **coordinates: int) -> R:
        """Return the value at the given coordinates; all dimensions must be given.

        Raises:
            KeyError: a dimension is missing or is not there.
            OutOfRangeError: a coordinate is out of range.
        """
        extent = self.extent
        extra = [label for label in coordinates if label not in extent]
        if extra:
            raise KeyError(f"item has extra dimensions: {extra}")
        rank = 0
        for label, size in extent.items():
            if label not in coordinates:
                raise KeyError(label)
            if not 0 <= coordinates[label] < size:
                raise OutOfRangeError(f"rank {coordinates[label]} not in current shape")
            rank = rank * size + coordinates[label]
        return self._values[rank]

    def __repr__(self) -> str:
        return f"ValueMesh({self.extent}):\n" + textwrap.indent(pprint.pformat(tuple(self.items())), "  ")
