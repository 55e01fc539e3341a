"""What the programs that measure one runtime each have in common: samples of named figures, printed as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

ARRAY_BYTES = 64 * 2**20
PAGE_ITEMS = 4096 // 4
"""Items of a float32 array per page of memory."""

PROCS = 8
OUTSTANDING = 1000


def array() -> Any:
    """Return an array of 64 MiB with something in each page."""
    return np.arange(ARRAY_BYTES // 4, dtype=np.float32)


def touch(values: Any) -> float:
    """Read one item of every page of an array, so that it is really there."""
    return float(values[::PAGE_ITEMS].sum())


def timed(action: Callable[[], object], rounds: int, warm_up: int = 0) -> list[float]:
    """Return the seconds that each of ``rounds`` calls took."""
    for _ in range(warm_up):
        action()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return times


def proportional_set_size(pid: int) -> float:
    """Return the bytes of memory of a process, shared pages counted in parts."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss:"):
                return float(line.split()[1]) * 1024
    raise ValueError(f"/proc/{pid}/smaps_rollup has no Pss")


def copying(rounds: int) -> dict[str, list[float]]:
    """What the machine needs to copy such an array, into memory that is there and into new memory."""
    source = array()
    there = np.ones_like(source)
    return {
        "memcpy": timed(lambda: np.copyto(there, source), rounds, 1),
        "memcpy_new": timed(source.copy, rounds, 1),
    }


def report(figures: Mapping[str, Callable[[int], dict[str, list[float]]]], rounds: dict[str, int]) -> None:
    """Measure the figures named in the first argument (separated by commas) and print them as one line of JSON."""
    for name in sys.argv[1].split(","):
        if name in figures:
            # After each group: what crashes later costs only itself.
            print("FIGURES " + json.dumps(figures[name](rounds[name])), flush=True)
