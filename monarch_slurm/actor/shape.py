"""Shapes of meshes: labelled dimensions over ranks, and how they are sliced.

The classes and their semantics are those of Monarch's ``hyperactor`` shapes: a `Slice` is a strided view of ranks, a
`Shape` names its dimensions, an `Extent` is labels and sizes alone, a `Point` is one place in an extent.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from monarch_slurm.actor.ndslice import OutOfRangeError, Slice
from monarch_slurm.wire import pack, unpack
from monarch_slurm.wire.plain import UnpackError


class NoDimensionError(KeyError, TypeError, ValueError):
    """There is no dimension of that name.

    Monarch raises a ValueError or a TypeError for this; a mapping raises a KeyError. Each of them catches it here.
    """

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class Extent(Mapping[str, int]):
    """Labels and sizes of dimensions.

    Raises:
        ValueError: the numbers of labels and sizes differ.
        OutOfRangeError: a size is negative.
    """

    __slots__ = ("_labels", "_sizes")

    def __init__(self, labels: Sequence[str], sizes: Sequence[int]) -> None:
        if len(labels) != len(sizes):
            raise ValueError(f"{len(labels)} labels and {len(sizes)} sizes")
        if min(sizes, default=0) < 0:
            raise OutOfRangeError(f"sizes {list(sizes)}: 0 or more expected")
        self._labels = tuple(labels)
        self._sizes = tuple(sizes)

    @property
    def labels(self) -> list[str]:
        """Names of the dimensions."""
        return list(self._labels)

    @property
    def sizes(self) -> list[int]:
        """Length of each dimension."""
        return list(self._sizes)

    @property
    def nelements(self) -> int:
        """Number of points."""
        return math.prod(self._sizes)

    @property
    def region(self) -> Shape:
        """The dense shape of this extent."""
        return Shape(self._labels, Slice.new_row_major(self._sizes))

    def __getitem__(self, label: str) -> int:
        try:
            return self._sizes[self._labels.index(label)]
        except ValueError:
            raise NoDimensionError(f"Dimension {label!r} not found; there are: {self.labels}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._labels)

    def __len__(self) -> int:
        return len(self._labels)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Extent):
            return (self._labels, self._sizes) == (other._labels, other._sizes)
        return Mapping.__eq__(self, other)

    def __hash__(self) -> int:
        return hash((self._labels, self._sizes))

    @staticmethod
    def from_bytes(bytes: builtins.bytes) -> Extent:  # noqa: A002 - Monarch's name
        """Return the extent whose ``__reduce__`` has these bytes; they are no pickle.

        Raises:
            ValueError: they are something else.
        """
        labels, sizes = _fields(bytes, "extent", 2)
        return Extent(_texts(labels), _numbers(sizes))

    def __reduce__(self) -> tuple[Any, ...]:
        return Extent.from_bytes, (pack([self._labels, self._sizes]),)

    def __str__(self) -> str:
        return "{" + ", ".join(f"{name}: {n}" for name, n in self.items()) + "}"

    __repr__ = __str__


class Point(Mapping[str, int]):
    """One place in an extent: a mapping of labels to coordinates, with the row-major rank."""

    __slots__ = ("_extent", "_rank")

    def __init__(self, rank: int, extent: Extent) -> None:
        if not 0 <= rank < extent.nelements:
            raise OutOfRangeError(f"rank {rank} is outside of extent {extent}")
        self._rank = rank
        self._extent = extent

    @property
    def rank(self) -> int:
        """Place in row-major order."""
        return self._rank

    @property
    def extent(self) -> Extent:
        """The extent that this is a place in."""
        return self._extent

    def size(self, label: str) -> int:
        """Return the size of dimension ``label``."""
        return self._extent[label]

    def __getitem__(self, label: str) -> int:
        size = self._extent[label]
        labels, sizes = self._extent.labels, self._extent.sizes
        stride = math.prod(sizes[labels.index(label) + 1 :])
        return self._rank // stride % size

    def __iter__(self) -> Iterator[str]:
        return iter(self._extent)

    def __len__(self) -> int:
        return len(self._extent)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Point):
            return (self._rank, self._extent) == (other._rank, other._extent)
        return Mapping.__eq__(self, other)

    def __hash__(self) -> int:
        return hash((self._rank, self._extent))

    @staticmethod
    def from_bytes(bytes: builtins.bytes) -> Point:  # noqa: A002 - Monarch's name
        """Return the point whose ``__reduce__`` has these bytes; they are no pickle.

        Raises:
            ValueError: they are something else, or its rank is outside of its extent.
        """
        rank, labels, sizes = _fields(bytes, "point", 3)
        return Point(_numbers([rank])[0], Extent(_texts(labels), _numbers(sizes)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Point.from_bytes, (pack([self._rank, self._extent._labels, self._extent._sizes]),)

    def __str__(self) -> str:
        return "{" + ", ".join(f"'{name}': {c}/{self._extent[name]}" for name, c in self.items()) + "}"

    __repr__ = __str__


class Shape:
    """Named dimensions over a `Slice` of ranks."""

    __slots__ = ("_labels", "_slice")

    def __init__(self, labels: Sequence[str], slice: Slice) -> None:  # noqa: A002 - Monarch's name
        if len(labels) != slice.ndim:
            raise ValueError(f"{len(labels)} labels for {slice.ndim} dimensions")
        self._labels = tuple(labels)
        self._slice = slice

    @staticmethod
    def unity() -> Shape:
        """Return the shape of one rank and no dimension."""
        return Shape((), Slice.new_row_major(()))

    @property
    def labels(self) -> list[str]:
        """Names of the dimensions."""
        return list(self._labels)

    @property
    def ndslice(self) -> Slice:
        """The ranks."""
        return self._slice

    @property
    def extent(self) -> Extent:
        """Labels and sizes."""
        return Extent(self._labels, self._slice.sizes)

    @property
    def region(self) -> Shape:
        """This shape, which is what Monarch calls a region, too."""
        return self

    def as_shape(self) -> Shape:
        """Return this shape."""
        return self

    def slice(self) -> Slice:
        """Return the ranks, as a region gives them."""
        return self._slice

    def ranks(self) -> list[int]:
        """Return the ranks in row-major order."""
        return list(self._slice)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the labelled coordinates of ``rank``."""
        return dict(zip(self._labels, self._slice.coordinates(rank), strict=True))

    def point(self, rank: int) -> Point:
        """Return the place of ``rank`` in this shape's extent."""
        return Point(self._slice.index(rank), self.extent)

    point_of_base_rank = point

    def at(self, label: str, index: int) -> Shape:
        """Return the shape without dimension ``label``, fixed at ``index``.

        Raises:
            NoDimensionError: there is no such dimension.
            OutOfRangeError: ``index`` is negative or too large.
        """
        dim = self._dim(label)
        sizes, strides = self._slice.sizes, self._slice.strides
        if not 0 <= index < sizes[dim]:
            raise OutOfRangeError("index out of range")
        offset = self._slice.offset + index * strides[dim]
        labels = self._labels[:dim] + self._labels[dim + 1 :]
        del sizes[dim], strides[dim]
        return Shape(labels, Slice(offset=offset, sizes=sizes, strides=strides))

    def select(self, label: str, slice: builtins.slice) -> Shape:  # noqa: A002 - Monarch's name
        """Return the shape with dimension ``label`` cut down to ``slice``.

        Raises:
            NoDimensionError: there is no such dimension.
            TypeError: ``slice`` is no slice.
            ValueError: nothing is left of it, or its step is negative.
        """
        dim = self._dim(label)
        if not isinstance(slice, builtins.slice):
            raise TypeError(f"a slice of dimension {label!r} expected, not {slice!r}")
        sizes, strides = self._slice.sizes, self._slice.strides
        start, stop, step = slice.indices(sizes[dim])
        if step <= 0 or start >= stop:
            raise ValueError(f"out of range {start}:{stop}:{step} for dimension {label} of size {sizes[dim]}")
        offset = self._slice.offset + start * strides[dim]
        sizes[dim] = len(range(start, stop, step))
        strides[dim] *= step
        return Shape(self._labels, Slice(offset=offset, sizes=sizes, strides=strides))

    def index(self, **coordinates: int) -> Shape:
        """Return the shape with some dimensions fixed."""
        shape = self
        for label, index in coordinates.items():
            shape = shape.at(label, index)
        return shape

    def _dim(self, label: str) -> int:
        try:
            return self._labels.index(label)
        except ValueError:
            raise NoDimensionError(f"Shape does not have dimension labeled {label!r}") from None

    def __len__(self) -> int:
        return len(self._slice)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shape) and (self._labels, self._slice) == (other._labels, other._slice)

    def __hash__(self) -> int:
        return hash((self._labels, self._slice))

    @staticmethod
    def from_bytes(bytes: builtins.bytes) -> Shape:  # noqa: A002 - Monarch's name
        """Return the shape whose ``__reduce__`` has these bytes; they are no pickle.

        Raises:
            ValueError: they are something else.
        """
        labels, offset, sizes, strides = _fields(bytes, "shape", 4)
        ndslice = Slice(offset=_numbers([offset])[0], sizes=_numbers(sizes), strides=_numbers(strides))
        return Shape(_texts(labels), ndslice)

    def __reduce__(self) -> tuple[Any, ...]:
        return Shape.from_bytes, (pack([self._labels, *self._slice._key()]),)

    def __str__(self) -> str:
        return "{" + ",".join(f"{label}={size}" for label, size in self.extent.items()) + "}"

    def __repr__(self) -> str:
        return f"Shape({self.labels}, {self._slice!r})"


def _fields(data: bytes, what: str, count: int) -> list[Any]:
    try:
        fields = unpack(data)
    except UnpackError as error:
        raise ValueError(f"these bytes are no {what}: {error!r}") from None
    if not isinstance(fields, list) or len(fields) != count:
        raise ValueError(f"these bytes are no {what}, which has {count} fields")
    return fields


def _texts(values: object) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"labels expected, not {values!r}")
    return values


def _numbers(values: object) -> list[int]:
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"numbers, 0 or more, expected, not {values!r}")
    return values
