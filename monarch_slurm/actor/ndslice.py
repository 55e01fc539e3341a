"""Slices: strided views of ranks, without names of dimensions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any


class OutOfRangeError(IndexError, OverflowError, ValueError):
    """A rank, an index or a coordinate is negative or too large.

    Monarch raises one or another of the three for this. Each of them catches it here.
    """


class Slice:
    """A strided view of ranks: coordinate ``c`` is rank ``offset + sum(c[i] * strides[i])``.

    Args:
        offset: rank of the first element.
        sizes: length of each dimension.
        strides: ranks between neighbours in each dimension.

    Raises:
        ValueError: the numbers of sizes and strides differ.
        OutOfRangeError: a number is negative.
    """

    __slots__ = ("_offset", "_sizes", "_strides")

    def __init__(self, *, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> None:
        if len(sizes) != len(strides):
            raise ValueError(f"{len(sizes)} sizes and {len(strides)} strides")
        if min((offset, *sizes, *strides)) < 0:
            raise OutOfRangeError(f"offset {offset}, sizes {list(sizes)}, strides {list(strides)}: 0 or more expected")
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
            OutOfRangeError: they are outside of the slice.
        """
        if len(coordinates) != self.ndim or any(not 0 <= c < n for c, n in zip(coordinates, self._sizes, strict=True)):
            raise OutOfRangeError(f"coordinates {list(coordinates)} are outside of sizes {self.sizes}")
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

    def get(self, index: int) -> int:
        """Return the rank at place ``index`` in row-major order over this slice.

        Raises:
            OutOfRangeError: there is no such place.
        """
        if not 0 <= index < len(self):
            raise OutOfRangeError(f"index {index} is outside of {len(self)} elements")
        rank = self._offset
        for n, s in zip(reversed(self._sizes), reversed(self._strides), strict=True):
            index, c = divmod(index, n)
            rank += c * s
        return rank

    def __len__(self) -> int:
        return math.prod(self._sizes)

    def __iter__(self) -> Iterator[int]:
        for coordinates in itertools.product(*(range(n) for n in self._sizes)):
            yield self._offset + sum(c * s for c, s in zip(coordinates, self._strides, strict=True))

    def __getitem__(self, item: int | slice) -> int | tuple[int, ...]:
        """Return the rank at a place, or those at a range of places.

        Raises:
            TypeError: a place is negative or no int. (Python's own sequences count negative places from the end.)
            IndexError: a place is too large, or the range has a negative step.
        """
        if isinstance(item, slice):
            places = range(*item.indices(len(self)))
            if places.step < 0:
                raise IndexError(f"step {places.step}: a range of places has a step of 1 or more")
            return tuple(self.get(i) for i in places)
        if not isinstance(item, int) or item < 0:
            raise TypeError(f"{item!r} is no place: an int of 0 or more, or a slice, expected")
        return self.get(item)

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
