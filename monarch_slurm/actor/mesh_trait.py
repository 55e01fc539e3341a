"""What all meshes can do: be sliced, split, flattened, renamed, measured."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, SupportsIndex

from monarch_slurm.actor.ndslice import Slice
from monarch_slurm.actor.shape import Extent, Shape


class MeshTrait(ABC):
    """Slicing and reshaping, for anything that has labelled ranks. Every method returns a view; nothing moves.

    A subclass gives ``_ndslice``, ``_labels`` and ``_new_with_shape``. No other attribute of it is looked at.
    """

    @property
    @abstractmethod
    def _ndslice(self) -> Slice:
        """The ranks."""

    @property
    @abstractmethod
    def _labels(self) -> tuple[str, ...]:
        """Names of the dimensions."""

    @abstractmethod
    def _new_with_shape(self, shape: Shape) -> Any:
        """Return a view of the ranks of ``shape``."""

    def slice(self, **kwargs: SupportsIndex | slice) -> Any:
        """Return the part of the mesh at the given coordinates; an int drops its dimension, a slice keeps it.

        Raises:
            TypeError: there is no such dimension.
            IndexError: an int is negative or too large.
            ValueError: a slice selects nothing.
        """
        shape = Shape(self._labels, self._ndslice)
        for label, part in kwargs.items():
            if isinstance(part, SupportsIndex):
                shape = shape.at(label, operator.index(part))
            else:
                shape = shape.select(label, part)
        return self._new_with_shape(shape)

    def split(self, **kwargs: Any) -> Any:
        """Split dimensions: ``split(host=("dp", "pp"), pp=16)`` makes ``dp`` and ``pp`` of ``host``.

        One size of each split may be left out.

        Raises:
            ValueError: sizes that do not divide the dimension, are missing or belong to no new dimension; doubled
                names.
        """
        splits = {label: names for label, names in kwargs.items() if not isinstance(names, int)}
        given = {name: size for name, size in kwargs.items() if isinstance(size, int)}
        extent = self.extent
        for label, names in splits.items():
            if isinstance(names, str):
                raise ValueError(f"expected a sequence of dimensions, but got {names!r} for {label!r}")  # noqa: TRY004 - what Monarch raises
            if label not in extent:
                raise ValueError(f"there is no dimension {label!r}; there are {extent.labels}")
        labels: list[str] = []
        sizes: list[int] = []
        strides: list[int] = []
        used: set[str] = set()
        for label, size, stride in zip(extent.labels, extent.sizes, self._ndslice.strides, strict=True):
            names = splits.get(label, (label,))
            parts = _sizes_of(label, size, names, {} if label not in splits else given)
            used.update(name for name in names if label in splits)
            for i, (name, part) in enumerate(zip(names, parts, strict=True)):
                labels.append(name)
                sizes.append(part)
                strides.append(stride * math.prod(parts[i + 1 :]))
        if len(set(labels)) != len(labels):
            raise ValueError(f"duplicate dimensions in {labels}")
        unused = set(given) - used
        if unused:
            raise ValueError(f"unused size constraints: {sorted(unused)}")
        return self._new_with_shape(Shape(labels, Slice(offset=self._ndslice.offset, sizes=sizes, strides=strides)))

    def flatten(self, name: str) -> Any:
        """Return the mesh with one dimension ``name`` over all its ranks.

        Raises:
            ValueError: the ranks are not contiguous.
        """
        ndslice = self._ndslice
        if not ndslice.dense:
            raise ValueError(f"cannot flatten sparse mesh {ndslice!r}")
        flat = Slice(offset=ndslice.offset, sizes=[len(ndslice)], strides=[1])
        return self._new_with_shape(Shape([name], flat))

    def rename(self, **kwargs: str) -> Any:
        """Return the mesh with dimensions renamed, old name to new."""
        return self.split(**{label: (name,) for label, name in kwargs.items()})

    def size(self, dim: str | Sequence[str] | None = None) -> int:
        """Return the number of elements along ``dim``, several dims, or all.

        Raises:
            KeyError: there is no such dimension.
        """
        extent = self.extent
        if dim is None:
            return extent.nelements
        if isinstance(dim, str):
            return extent[dim]
        return math.prod(extent[label] for label in dim)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each dimension."""
        return dict(self.extent)

    @property
    def extent(self) -> Extent:
        """Labels and sizes."""
        return Extent(self._labels, self._ndslice.sizes)

    def __len__(self) -> int:
        return len(self._ndslice)


class ShapedMesh(MeshTrait):
    """A mesh that has its labels and ranks as one `Shape`."""

    @property
    @abstractmethod
    def _shape(self) -> Shape:
        """Labels and ranks."""

    @property
    def _ndslice(self) -> Slice:
        return self._shape.ndslice

    @property
    def _labels(self) -> tuple[str, ...]:
        return tuple(self._shape.labels)


def _sizes_of(label: str, size: int, names: Sequence[str], given: dict[str, int]) -> list[int]:
    known = math.prod(given[name] for name in names if name in given)
    missing = [name for name in names if name not in given]
    if len(missing) > 1:
        raise ValueError(f"cannot infer size of {missing} in the split of {label!r}: give all but one")
    if size % known or (not missing and known != size):
        raise ValueError(f"{label!r} of size {size} is not evenly divided by sizes {[given.get(n) for n in names]}")
    return [given.get(name, size // known) for name in names]
