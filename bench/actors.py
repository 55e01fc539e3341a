"""How long the runtime's basic operations take on this machine, without any work in them.

    python bench/actors.py [--json FILE] [--rounds N]

Prints a table: median, 95th percentile and worst of each operation, in milliseconds. All processes run on this machine,
so nothing of a network is in these figures. Run it on an idle machine: a call and its answer are fourteen switches from
one thread to another, and little else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import monarch_slurm.actor as public
from monarch_slurm.actor import Actor, MeshFailure, Port, ProcMesh, endpoint, this_host

WAIT = 60.0
PROCS = 8


class Echo(Actor):
    """Answers."""

    @endpoint
    def echo(self, value: object) -> object:
        return value

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class AsyncEcho(Actor):
    """Answers, on an event loop."""

    @endpoint
    async def echo(self, value: object) -> object:
        return value


class Owner(Actor):
    """Is told of the death of a proc that it owns, and says when."""

    def __init__(self, port: Port[float]) -> None:
        self._port = port

    @endpoint
    def start(self) -> int:
        self._procs = this_host().spawn_procs()
        pid: int = self._procs.spawn("echo", Echo).pid.call_one().get(WAIT)
        return pid

    def __supervise__(self, failure: MeshFailure) -> bool:
        self._port.send(time.time())
        return True


def timed(action: Callable[[], object], rounds: int, warm_up: int = 0) -> list[float]:
    """Return the milliseconds that each of ``rounds`` calls took."""
    for _ in range(warm_up):
        action()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        action()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def round_trips(rounds: int) -> dict[str, list[float]]:
    """Calls of one actor and of eight."""
    procs = this_host().spawn_procs({"n": PROCS})
    echo: Any = procs.spawn("echo", Echo)
    async_echo: Any = procs.spawn("async_echo", AsyncEcho)
    one, async_one = echo.slice(n=0), async_echo.slice(n=0)
    echo.echo.call(None).get(WAIT)
    megabyte = bytes(2**20)

    def stream_of_broadcasts() -> None:
        for _ in range(100):
            one.echo.broadcast(None)
        one.echo.call_one(None).get(WAIT)

    results = {
        "call_one, sync actor": timed(lambda: one.echo.call_one(None).get(WAIT), 10 * rounds, 200),
        "call_one, async actor": timed(lambda: async_one.echo.call_one(None).get(WAIT), 10 * rounds, 200),
        "call_one, 1 MiB there and back": timed(lambda: one.echo.call_one(megabyte).get(WAIT), 2 * rounds, 10),
        f"call on {PROCS} actors": timed(lambda: echo.echo.call(None).get(WAIT), 2 * rounds, 20),
        "100 broadcasts and a call": timed(stream_of_broadcasts, rounds, 5),
    }
    procs.stop().get(WAIT)
    return results


def life_cycle(rounds: int) -> dict[str, list[float]]:
    """Spawning and stopping."""
    results: dict[str, list[float]] = {}
    for count in (1, PROCS):
        spawns, stops = [], []
        for _ in range(rounds):
            meshes: list[ProcMesh] = []

            def spawn(count: int = count, meshes: list[ProcMesh] = meshes) -> None:
                meshes.append(this_host().spawn_procs({"n": count}))
                meshes[-1].spawn("echo", Echo).echo.call(None).get(WAIT)

            spawns += timed(spawn, 1)
            stops += timed(lambda meshes=meshes: meshes[-1].stop().get(WAIT), 1)  # type: ignore[misc]
        results[f"spawn {count} proc(s) to first answer"] = spawns
        results[f"stop {count} proc(s)"] = stops
    return results


def deaths(rounds: int) -> dict[str, list[float]]:
    """kill -9 of a proc to what its owner sees."""
    told = threading.Semaphore(0)
    times: list[float] = []

    def hook(failure: MeshFailure) -> None:
        times.append(time.time())
        told.release()

    public.unhandled_fault_hook = hook
    at_root, pending_calls = [], []
    for _ in range(rounds):
        echo: Any = this_host().spawn_procs().spawn("echo", Echo)
        pid = echo.pid.call_one().get(WAIT)
        start = time.time()
        os.kill(pid, signal.SIGKILL)
        assert echo.echo.call_one(None).exception(WAIT) is not None
        pending_calls.append((time.time() - start) * 1e3)
        assert told.acquire(timeout=WAIT)
        at_root.append((times[-1] - start) * 1e3)
    port, receiver = public.Channel.open()
    procs = this_host().spawn_procs()
    owner: Any = procs.spawn("owner", Owner, port)
    in_owner = []
    for _ in range(rounds):
        pid = owner.start.call_one().get(WAIT)
        start = time.time()
        os.kill(pid, signal.SIGKILL)
        in_owner.append((receiver.recv().get(WAIT) - start) * 1e3)
    procs.stop().get(WAIT)
    return {
        "kill -9 to __supervise__ of its owner": in_owner,
        "kill -9 to the fault hook of the program": at_root,
        "kill -9 to the end of a call": pending_calls,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    start = time.perf_counter()
    this_host().spawn_procs().initialized.get(WAIT)
    results = {"first proc of the program": [(time.perf_counter() - start) * 1e3]}
    for group in (round_trips, life_cycle, deaths):
        results.update(group(options.rounds))
    figures = {
        name: {
            "n": len(values),
            "median_ms": round(statistics.median(values), 3),
            "p95_ms": round(sorted(values)[int(0.95 * (len(values) - 1))], 3),
            "worst_ms": round(max(values), 3),
        }
        for name, values in results.items()
    }
    print(f"{'operation':<42} {'n':>5} {'median ms':>10} {'p95 ms':>10} {'worst ms':>10}")
    for name, row in figures.items():
        print(f"{name:<42} {row['n']:>5} {row['median_ms']:>10.3f} {row['p95_ms']:>10.3f} {row['worst_ms']:>10.3f}")
    if options.json is not None:
        about = {"python": platform.python_version(), "cpus": os.cpu_count(), "load": os.getloadavg()[0]}
        options.json.write_text(json.dumps({"about": about, "figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
