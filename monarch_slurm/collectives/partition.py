"""Which ranks of a mesh belong to one communicator."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence


def groups_along(sizes: Mapping[str, int], dims: Sequence[str]) -> list[list[int]]:
    """Return the row-major ranks that differ only along ``dims``, one list per place in the other dimensions.

    In each list the ranks are ordered by ``dims`` as given, the last one running fastest.

    Raises:
        ValueError: a dimension that is not there or is named twice, or none.
    """
    labels = list(sizes)
    if not dims or len(set(dims)) != len(dims) or any(dim not in sizes for dim in dims):
        raise ValueError(f"dims {list(dims)}: different dimensions of {labels} expected")
    strides = {}
    stride = 1
    for label in reversed(labels):
        strides[label] = stride
        stride *= sizes[label]
    others = [label for label in labels if label not in dims]

    def offsets(names: Sequence[str]) -> list[int]:
        places = itertools.product(*(range(sizes[name]) for name in names))
        return [sum(at * strides[name] for at, name in zip(place, names, strict=True)) for place in places]

    return [[base + step for step in offsets(dims)] for base in offsets(others)]
