"""Large payloads over a runtime with Monarch's API, this one or torchmonarch: ``payload_api.py PARTS MIBS``.

The variable ``PAYLOADS_API`` names the module of the API, here and in its procs.

Prints a line ``FIGURES`` with the seconds of each transfer, by ``PART KIND MIB``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

API = os.environ.get("PAYLOADS_API", "monarch_slurm.actor")
monarch: Any = importlib.import_module(API)
ROUNDS = 4
SMALL_CALLS = 300
MIB = 2**20


class Echo(monarch.Actor):  # type: ignore[misc]
    """Keeps the last value, as a program would."""

    def __init__(self) -> None:
        self.data: Any = None

    @monarch.endpoint
    def take(self, data: Any) -> None:
        self.data = data

    @monarch.endpoint
    def give(self) -> Any:
        return self.data

    @monarch.endpoint
    def nothing(self) -> None:
        pass


def payloads(size: int) -> Iterator[tuple[str, Any]]:
    """Values of about ``size`` bytes."""
    yield "numpy array", np.ones(size, dtype=np.uint8)
    yield "numpy array, transposed", np.ones((size // 4096, 4096), dtype=np.uint8).T
    yield "torch tensor", torch.ones(size // 4)
    yield "parameter", torch.nn.Parameter(torch.ones(size // 4))
    yield "dict of 256 tensors", {f"layers.{i}.weight": torch.ones(size // 1024) for i in range(256)}
    whole = torch.ones(size // 4)
    yield "two views of one tensor", [whole[: size // 8], whole[size // 8 :]]
    yield "bytes", b"x" * size
    yield "bytearray", bytearray(b"x") * size
    yield "str", "x" * size


def seconds(action: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Return how long each call took."""
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        action()
        found.append(time.perf_counter() - began)
    return found


def echo_here() -> Any:
    return monarch.this_host().spawn_procs(per_host={"procs": 1}).spawn("echo", Echo)


def copies(sizes: list[int]) -> dict[str, list[float]]:
    """What the machine needs to copy such an array into new memory, without a runtime."""
    figures = {}
    for size in sizes:
        source = np.ones(size, dtype=np.uint8)
        figures[f"memcpy into new memory {size // MIB}"] = seconds(source.copy, 2 * ROUNDS)
    return figures


def kinds(sizes: list[int]) -> dict[str, list[float]]:
    """Each kind of payload to a proc of this host and back."""
    echo = echo_here()
    figures: dict[str, list[float]] = {}
    for size in sizes:
        for name, data in payloads(size):
            there, back = [], []
            for _ in range(ROUNDS):  # in turns: a result is what was sent just before
                there += seconds(lambda data=data: echo.take.call_one(data).get(), 1)  # type: ignore[misc]
                back += seconds(lambda: echo.give.call_one().get(), 1)
            figures[f"there {name} {size // MIB}"] = there
            figures[f"back {name} {size // MIB}"] = back
    return figures


def small(sizes: list[int], large_echo: Any = None, small_echo: Any = None) -> dict[str, list[float]]:
    """Small calls while the largest payload travels to another proc, and while nothing else does."""
    large_echo, small_echo = large_echo or echo_here(), small_echo or echo_here()
    call = lambda: small_echo.nothing.call_one().get()  # noqa: E731
    data = np.ones(sizes[-1], dtype=np.uint8)
    large_echo.take.call_one(data).get()
    figures = {f"small call, idle {sizes[-1] // MIB}": seconds(call, SMALL_CALLS)}
    stopping = threading.Event()

    def load() -> None:
        while not stopping.is_set():
            large_echo.take.call_one(data).get()

    thread = threading.Thread(target=load)
    thread.start()
    figures[f"small call, loaded {sizes[-1] // MIB}"] = seconds(call, SMALL_CALLS)
    stopping.set()
    thread.join()
    return figures


PARTS = {"copies": copies, "kinds": kinds, "small": small}


def main() -> None:
    """Measure what the arguments name."""
    if API.startswith("monarch_slurm"):
        from monarch_slurm.config import configure

        configure(preload="torch")
    sizes = [int(size) * MIB for size in sys.argv[2].split(",")]
    for name in sys.argv[1].split(","):
        print("FIGURES " + json.dumps(PARTS[name](sizes)), flush=True)


if __name__ == "__main__":
    main()
