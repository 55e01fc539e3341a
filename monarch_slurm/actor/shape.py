"""Shapes of meshes: labelled dimensions over ranks, and how they are sliced.

The classes and their semantics are those of Monarch's ``hyperactor`` shapes: a `Slice` is a strided view of ranks, a
`Shape` names its dimensions, an `Extent` is labels and sizes alone, a `Point` is one place in an extent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class Slice:
    """A strided view of ranks: coordinate ``c`` is rank ``offset + sum(c[i] * strides[i])``.

    Args:
        offset: rank of the first element.
        sizes: length of each dimension.
        strides: ranks between neighbours in each dimension.
    """

    __slots__ = ("_offset", "_sizes", "_strides")

    def __init__(self, *, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> None:
        if len(sizes) != len(strides):
            raise ValueError(f"{len(sizes)} sizes and {len(strides)} strides")
        self._offset = offset
        self._sizes = tuple(sizes)
        self._strides = tuple(strides)

    @staticmethod
    def new_row_major(sizes: Sequence[int]) -> Slice:
        """Return the dense slice of ``sizes`` that begins at rank 0."""
        return Slice(offset=0, sizes=sizes, strides=_row_major(sizes))

    @staticmethod
    def from_list(ranks: Sequence[int]) -> list[Slice]:
        """Return slices of one dimension that have together ``ranks``, in their order: few of them where ranks are
        evenly spaced and rise.
        """
        slices = []
        start = 0
        while start < len(ranks):
            end = start + 1
            step = ranks[end] - ranks[start] if end < len(ranks) and ranks[end] > ranks[start] else 1
            while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
                end += 1
            slices.append(Slice(offset=ranks[start], sizes=[end - start], strides=[step]))
            start = end
        return slices

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self._sizes)

    @property
    def offset(self) -> int:
        """Rank of the first element."""
        return self._offset

    @property
    def sizes(self) -> list[int]:
        """Length of each dimension."""
        return list(self._sizes)

    @property
    def strides(self) -> list[int]:
        """Ranks between neighbours in each dimension."""
        return list(self._strides)

    @property
    def dense(self) -> bool:
        """Whether the ranks are contiguous in row-major order."""
        return self._strides == tuple(_row_major(self._sizes))

    def nditem(self, coordinates: Sequence[int]) -> int:
        """Return the rank at ``coordinates``.

        Raises:
            IndexError: outside of the slice.
        """
        if len(coordinates) != self.ndim or any(not 0 <= c < n for c, n in zip(coordinates, self._sizes, strict=True)):
            raise IndexError(f"coordinates {list(coordinates)} are outside of sizes {self.sizes}")
        return self._offset + sum(c * s for c, s in zip(coordinates, self._strides, strict=True))

    def coordinates(self, value: int) -> list[int]:
        """Return the coordinates of rank ``value``.

        Raises:
            ValueError: the rank is not in the slice.
        """
        rest = value - self._offset
        found = [0] * self.ndim
        for i in sorted(range(self.ndim), key=lambda i: -self._strides[i]):
            if self._sizes[i] > 1:
                found[i] = min(rest // self._strides[i], self._sizes[i] - 1) if rest >= 0 else 0
                rest -= found[i] * self._strides[i]
        if rest != 0:
            raise ValueError(f"rank {value} is not in {self!r}")
        return found

    def index(self, value: int) -> int:
        """Return the place of rank ``value`` in row-major order over this slice."""
        place = 0
        for c, n in zip(self.coordinates(value), self._sizes, strict=True):
            place = place * n + c
        return place

    def get(self, place: int) -> int:
        """Return the rank at ``place`` in row-major order over this slice."""
        if not 0 <= place < len(self):
            raise IndexError(f"index {place} is outside of {len(self)} elements")
        rank = self._offset
        for n, s in zip(reversed(self._sizes), reversed(self._strides), strict=True):
            place, c = divmod(place, n)
            rank += c * s
        return rank

    def __len__(self) -> int:
        return math.prod(self._sizes)

    def __iter__(self) -> Iterator[int]:
        for coordinates in itertools.product(*(range(n) for n in self._sizes)):
            yield self._offset + sum(c * s for c, s in zip(coordinates, self._strides, strict=True))

    def __getitem__(self, item: int | slice) -> int | tuple[int, ...]:
        if isinstance(item, slice):
            return tuple(self.get(i) for i in range(*item.indices(len(self))))
        return self.get(item + len(self) if item < 0 else item)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slice) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_slice, self._key()

    def __repr__(self) -> str:
        return f"Slice(offset={self._offset}, sizes={self.sizes}, strides={self.strides})"

    def _key(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        return self._offset, self._sizes, self._strides


NDSlice = Slice


def _make_slice(offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Slice:
    return Slice(offset=offset, sizes=sizes, strides=strides)


def _row_major(sizes: Sequence[int]) -> list[int]:
    strides = [1] * len(sizes)
    for i in range(len(sizes) - 2, -1, -1):
        strides[i] = strides[i + 1] * sizes[i + 1]
    return strides


class Extent(Mapping[str, int]):
    """Labels and sizes of dimensions."""

    __slots__ = ("_labels", "_sizes")

    def __init__(self, labels: Sequence[str], sizes: Sequence[int]) -> None:
        if len(labels) != len(sizes):
            raise ValueError(f"{len(labels)} labels and {len(sizes)} sizes")
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
            raise KeyError(label) from None

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

    def __reduce__(self) -> tuple[Any, ...]:
        return Extent, (self._labels, self._sizes)

    def __str__(self) -> str:
        return "{" + ", ".join(f"{name}: {n}" for name, n in self.items()) + "}"

    def __repr__(self) -> str:
        return f"Extent({self})"


class Point(Mapping[str, int]):
    """One place in an extent: a mapping of labels to coordinates, with the row-major rank."""

    __slots__ = ("_extent", "_rank")

    def __init__(self, rank: int, extent: Extent) -> None:
        if not 0 <= rank < extent.nelements:
            raise IndexError(f"rank {rank} is outside of extent {extent}")
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

    def __reduce__(self) -> tuple[Any, ...]:
        return Point, (self._rank, self._extent)

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
            IndexError: ``index`` is negative or too large.
        """
        dim = self._dim(label)
        sizes, strides = self._slice.sizes, self._slice.strides
        if not 0 <= index < sizes[dim]:
            raise IndexError("index out of range")
        offset = self._slice.offset + index * strides[dim]
        labels = self._labels[:dim] + self._labels[dim + 1 :]
        del sizes[dim], strides[dim]
        return Shape(labels, Slice(offset=offset, sizes=sizes, strides=strides))

    def select(self, label: str, part: slice) -> Shape:
        """Return the shape with dimension ``label`` cut down to ``part``.

        Raises:
            ValueError: nothing is left of it.
        """
        dim = self._dim(label)
        sizes, strides = self._slice.sizes, self._slice.strides
        start, stop, step = part.indices(sizes[dim])
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
            raise TypeError(f"Shape does not have dimension labeled {label!r}") from None

    def __len__(self) -> int:
        return len(self._slice)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shape) and (self._labels, self._slice) == (other._labels, other._slice)

    def __hash__(self) -> int:
        return hash((self._labels, self._slice))

    def __reduce__(self) -> tuple[Any, ...]:
        return Shape, (self._labels, self._slice)

    def __str__(self) -> str:
        return str(self.extent)

    def __repr__(self) -> str:
        return f"Shape({self.labels}, {self._slice!r})"
