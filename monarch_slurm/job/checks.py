"""Arguments that several kinds of jobs have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from monarch_slurm.host.places import OnLost
from monarch_slurm.job.errors import JobSpecError


def check_spares(spares: int, on_lost: str = "shrink") -> tuple[int, OnLost]:
    """Return the arguments.

    Raises:
        JobSpecError: they make no sense.
    """
    if isinstance(spares, bool) or not isinstance(spares, int) or spares < 0:
        raise JobSpecError(f"spares is {spares!r}; a number of hosts, 0 or more, expected")
    for known in get_args(OnLost):
        if on_lost == known:
            return spares, known
    raise JobSpecError(f"on_lost is {on_lost!r}; one of {', '.join(get_args(OnLost))} expected")


def check_meshes(meshes: Mapping[str, int]) -> dict[str, int]:
    """Return ``meshes`` as a dict of its own.

    Raises:
        JobSpecError: there is none, a size is not positive, or a name cannot be an attribute.
    """
    if not meshes:
        raise JobSpecError("a job needs at least one mesh of hosts, such as {'hosts': 4}")
    for name, size in meshes.items():
        if not name.isidentifier() or name.startswith("_"):
            raise JobSpecError(f"mesh name {name!r}: letters, digits and '_' expected, and no '_' first")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise JobSpecError(f"mesh {name!r}: {size!r} hosts; at least 1 expected")
    return dict(meshes)
