"""The procs of one host, as ``spawn_procs`` is told of them: how many, and which CPUs, memory and GPUs each has."""

from __future__ import annotations

from typing import Any

from monarch_slurm.gpu import parse_cpu_list


def check_sizes(per_host: dict[str, Any]) -> None:
    """Make sure that ``per_host`` maps labels to sizes.

    Raises:
        TypeError: it maps something else.
        ValueError: a size is not positive.
    """
    for label, size in per_host.items():
        if not isinstance(label, str) or isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(
                f"per_host maps labels to numbers of procs, such as {{'gpus': 8}}; not {label!r} to {size!r}"
            )
        if size < 1:
            raise ValueError(f"per_host sizes must be 1 or more: {per_host}")


_BINDS = {"cpus": "cpus", "physcpubind": "cpus", "gpus": "gpus", "cpunodebind": "cpu_nodes", "membind": "memory_nodes"}
"""Keys of ``proc_bind``, and what a request for a proc calls them."""


def bind_fields(bind: dict[str, str]) -> dict[str, list[int]]:
    """Return what an entry of ``proc_bind`` names, as a request for a proc says it.

    Raises:
        ValueError: it has an unknown key, or a text that is no list of numbers.
    """
    unknown = set(bind) - set(_BINDS)
    if unknown:
        raise ValueError(f"proc_bind knows {', '.join(_BINDS)} only, not {sorted(unknown)}")
    found: dict[str, list[int]] = {name: [] for name in _BINDS.values()}
    try:
        for key, text in bind.items():
            found[_BINDS[key]] = parse_cpu_list(text)
        return found
    except ValueError as error:
        raise ValueError(f"proc_bind {bind}: {error}") from None
