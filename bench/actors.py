"""How long the runtime's basic operations take on this machine, beside torchmonarch and Ray if they are given.

    python bench/actors.py [--torchmonarch PYTHON] [--ray PYTHON] [--groups latency,large] [--passes 3] [--json FILE]

Each runtime runs in programs of its own, one after the other and over again, so that what the machine does besides
falls on all alike. Nothing of a network is in these figures, and no work: an operation is what it costs by itself.
Trust the ratios of one run, not figures of different runs. The programs are in ``bench/runtimes``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RUNTIMES = Path(__file__).parent / "runtimes"
GROUPS = ("latency", "outstanding", "mesh_call", "large", "life_cycle", "deaths")
PROGRAM_SECONDS = 600

OURS, MONARCH, RAY = "monarch_slurm", "torchmonarch", "ray"
ARRAY_MEGABYTES = 64 * 2**20 / 1e6

US, MS, PER_SECOND, RATE, MEGABYTES = "µs", "ms", "calls/s", "MB/s", "MB"

FIGURES: list[tuple[str, str, str, float, str]] = [
    # title, samples, unit, percentile, what is to be reached (x is the ratio to torchmonarch)
    ("call_one().get() from the main thread, median", "call_one", US, 0.50, "≤ 0.5 x"),
    ("… 99th percentile", "call_one", US, 0.99, "≤ 0.5 x"),
    ("await from actor to actor in another proc", "actor_to_actor", US, 0.50, "≤ 0.5 x"),
    ("1,000 call_one outstanding", "outstanding", PER_SECOND, 0.50, "≥ 2 x"),
    ("call() of 8 procs", "call_8", US, 0.50, "≤ 0.7 x"),
    ("8 procs that use torch, spawn to first answer", "spawn_8", MS, 0.50, "≤ 0.3 x"),
    ("64 MiB array as argument", "argument", RATE, 0.50, "≥ 3 x, ½ of a copy"),
    ("64 MiB array as result", "result", RATE, 0.50, "≥ 3 x, ½ of a copy"),
    ("kill -9 to __supervise__ of the owner, median", "told", MS, 0.50, "≤ 50 ms"),
    ("… worst", "told", MS, 1.00, ""),
    ("kill -9 to a new proc answering, with torch", "respawned", MS, 0.50, "≤ 300 ms"),
    ("stop() of 8 procs", "stop_8", MS, 0.50, "≤ 0.2 x"),
    ("memory of each of 8 procs with torch (PSS)", "memory", MEGABYTES, 0.50, "≤ 0.5 x"),
    ("copy of 64 MiB into memory that is there", "memcpy", RATE, 0.50, ""),
    ("copy of 64 MiB into new memory", "memcpy_new", RATE, 0.50, ""),
]


def measure(runtime: str, python: str, groups: list[str], scale: float) -> dict[str, list[float]]:
    """Run the program of one runtime; return its samples (seconds; bytes of memory) by name."""
    program = "ray_api.py" if runtime == RAY else "monarch_api.py"
    module = {OURS: "monarch_slurm.actor", MONARCH: "monarch.actor", RAY: "-"}[runtime]
    ended = subprocess.run(
        [python, str(RUNTIMES / program), ",".join(groups), module, str(scale)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
        check=False,
        env={**os.environ, "PYTHONPATH": str(RUNTIMES), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
    )
    samples: dict[str, list[float]] = {}
    for line in ended.stdout.splitlines():
        if line.startswith("FIGURES "):
            samples.update(json.loads(line.removeprefix("FIGURES ")))
    if ended.returncode:
        print(f"{runtime} ended with status {ended.returncode}:\n{ended.stderr[-2000:]}", file=sys.stderr)
    return samples


def figure(samples: list[float], unit: str, percentile: float) -> float:
    """Return one figure of ``samples`` in its unit; a rate is that of the time at the percentile."""
    value = sorted(samples)[min(int(percentile * len(samples)), len(samples) - 1)]
    if unit == PER_SECOND:
        return 1000 / value
    if unit == RATE:
        return ARRAY_MEGABYTES / value
    return value * {US: 1e6, MS: 1e3, MEGABYTES: 1e-6}[unit]


def rows(samples: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Return one row per figure that any runtime has."""
    found = []
    for title, name, unit, percentile, goal in FIGURES:
        values = {
            runtime: figure(of_runtime[name], unit, percentile)
            for runtime, of_runtime in samples.items()
            if of_runtime.get(name)
        }
        if OURS not in values:
            continue
        ratios = {peer: values[OURS] / value for peer, value in values.items() if peer != OURS}
        found.append(
            {
                "figure": title, "unit": unit, "values": values, "ratios": ratios, "goal": goal,
                "samples": {runtime: len(samples[runtime][name]) for runtime in values},
            }
        )  # fmt: skip
    return found


def show(found: list[dict[str, Any]], runtimes: list[str]) -> None:
    """Print the table."""
    table = Table("figure", "unit", *(runtimes), *(f"ratio to {peer}" for peer in runtimes[1:]), "to reach")
    for row in found:
        values = [f"{row['values'][runtime]:,.0f}" if runtime in row["values"] else "" for runtime in runtimes]
        ratios = [f"{row['ratios'][peer]:.2f}" if peer in row["ratios"] else "" for peer in runtimes[1:]]
        table.add_row(row["figure"], row["unit"], *values, *ratios, row["goal"])
    Console(width=160 if not sys.stdout.isatty() else None).print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchmonarch", metavar="PYTHON", help="a Python that has torchmonarch, torch and numpy")
    parser.add_argument("--ray", metavar="PYTHON", help="a Python that has ray, torch and numpy")
    parser.add_argument("--groups", default=",".join(GROUPS), help=f"some of {', '.join(GROUPS)} (default: all)")
    parser.add_argument("--passes", type=int, default=3, help="how often the runtimes take turns")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the number of samples")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    groups = options.groups.split(",")
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"unknown group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    pythons = {OURS: sys.executable, MONARCH: options.torchmonarch, RAY: options.ray}
    runtimes = [runtime for runtime, python in pythons.items() if python]
    samples: dict[str, dict[str, list[float]]] = {runtime: {} for runtime in runtimes}
    for _ in range(options.passes):
        for runtime in runtimes:
            for name, values in measure(runtime, pythons[runtime], groups, options.scale).items():
                samples[runtime].setdefault(name, []).extend(values)
    found = rows(samples)
    show(found, runtimes)
    if options.json is not None:
        about = {"python": platform.python_version(), "cpus": os.cpu_count(), "load": os.getloadavg()[0]}
        options.json.write_text(json.dumps({"about": about, "figures": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
