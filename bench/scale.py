"""What a controller of many hosts costs, on this machine: CPU per call, memory, descriptors, time to notice deaths.

    python bench/scale.py [--hosts 8,64,512,4096] [--procs 8] [--processes 2] [--json FILE]

The controller is a real one, with its own hub and one CURVE connection per agent. The agents are simulated, many in a
process (``bench/scale_agents.py``), with real sockets and the real protocol; their procs are pretended. So what is
shown is the cost of the controller; what agents and procs do in parallel on a cluster shares this machine here, which
makes the wall-clock times too long. CPU seconds are those of all threads of the controller process. Jobs of 1,000
hosts and more have a heartbeat every 10 s.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import monarch_slurm.actor as public
from monarch_slurm.actor import Actor, MeshFailure, endpoint
from monarch_slurm.actor.client import client
from monarch_slurm.config import configure, settings
from monarch_slurm.controller import gather_hosts, publish

AGENTS = Path(__file__).parent / "scale_agents.py"
DEADLINE = 600.0
LINK_SECONDS = 120.0
IDLE_SECONDS = 5.0
SIZE_SECONDS = 1800

COLUMNS = {
    "hosts": ("hosts", 1, 0), "join_s": ("join s", 1, 1), "spawn_cpu": ("spawn cpu s", 1, 2),
    "stop_cpu": ("stop cpu s", 1, 2),
    "call_cpu": ("call cpu ms", 1e3, 2), "call_wall": ("call ms", 1e3, 1),
    "broadcast_cpu": ("broadcast cpu ms", 1e3, 2), "idle_cpu": ("idle cpu %", 100, 1),
    "unlinked": ("not in the tree", 1, 0), "rss": ("RSS MB", 1e-6, 0), "fds": ("descriptors", 1, 0),
    "died_s": ("1 % die: noticed s", 1, 2), "muted_s": ("1 % fall silent: noticed s", 1, 2),
}  # fmt: skip
"""For each figure: its title, a factor and the decimals shown."""


class Echo(Actor):
    """What is called; it never runs here."""

    @endpoint
    def echo(self, value: int) -> int:
        return value


class Agents:
    """Processes full of simulated agents."""

    def __init__(self, folder: Path, count: int, processes: int) -> None:
        each = -(-count // processes)
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(AGENTS), str(folder), str(first), str(min(each, count - first))],
                stdin=subprocess.PIPE,
            )
            for first in range(0, count, each)
        ]

    def tell(self, what: str, number: int) -> None:
        """Have ``number`` of them ``die`` or fall ``mute``, spread over the processes."""
        shares = [number // len(self._processes)] * len(self._processes)
        for i in range(number % len(self._processes)):
            shares[i] += 1
        for process, share in zip(self._processes, shares, strict=True):
            assert process.stdin is not None
            if share:
                process.stdin.write(f"{what} {share}\n".encode())
                process.stdin.flush()

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
            process.wait()


def cpu_of(action: Callable[[], Any], seconds: float) -> tuple[float, float]:
    """Return the median CPU and wall-clock seconds of ``action``, which is repeated for about ``seconds``."""
    cpus: list[float] = []
    walls: list[float] = []
    began = time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds or (len(cpus) < 3 and passed < 10 * seconds):
        cpu, wall = time.process_time(), time.perf_counter()
        action()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return statistics.median(cpus), statistics.median(walls)


def noticed(agents: Agents, what: str, number: int) -> float:
    """Return the seconds until the controller knows that ``number`` agents are gone."""
    here = client()
    with here.hosts_changed:
        left = len(here.joined) - number
        began = time.perf_counter()
        agents.tell(what, number)
        if not here.hosts_changed.wait_for(lambda: len(here.joined) <= left, DEADLINE):
            raise TimeoutError(f"{len(here.joined) - left} of {number} agents are still thought to be there")
    return time.perf_counter() - began


def measure(count: int, procs: int, processes: int, seconds: float) -> dict[str, float]:
    """Return the figures of a job of ``count`` hosts."""
    public.unhandled_fault_hook = ignore
    # Thousands of agents share a few cores here, so none may be called dead for want of CPU; and calls take so long
    # that heartbeats would be most of what they seem to cost.
    configure(heartbeat_interval=1.0 if count < 1000 else 10.0, missed_heartbeats=3)
    limit = settings().heartbeat_interval * settings().missed_heartbeats
    figures: dict[str, float] = {"hosts": count, "silence_limit_s": limit}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "job"
        publish(folder, address="127.0.0.1")
        began = time.perf_counter()
        agents = Agents(folder, count, processes)
        try:
            hosts = gather_hosts([f"n{i}" for i in range(count)], timeout=DEADLINE)
            figures["join_s"] = time.perf_counter() - began
            cpu = time.process_time()
            mesh = hosts.spawn_procs({"gpus": procs})
            mesh.initialized.get(DEADLINE)
            echo: Any = mesh.spawn("echo", Echo)
            echo.initialized.get(DEADLINE)
            figures["spawn_cpu"] = time.process_time() - cpu
            other = hosts.spawn_procs({"gpus": procs})
            other.initialized.get(DEADLINE)
            cpu = time.process_time()
            other.stop().get(DEADLINE)
            figures["stop_cpu"] = time.process_time() - cpu
            tree = client().hub._caster.tree
            began = time.perf_counter()
            while tree.unlinked() and time.perf_counter() < began + LINK_SECONDS:
                time.sleep(0.5)
            cpu, began = time.process_time(), time.perf_counter()
            time.sleep(max(IDLE_SECONDS, settings().heartbeat_interval))
            figures["idle_cpu"] = (time.process_time() - cpu) / (time.perf_counter() - began)

            def call() -> Any:
                return echo.echo.call(1).get(DEADLINE)

            figures["call_cpu"], figures["call_wall"] = cpu_of(call, seconds)
            several = 10

            def broadcasts() -> None:
                for _ in range(several):
                    echo.echo.broadcast(1)
                call()  # ends when all have been sent

            both, _ = cpu_of(broadcasts, seconds)
            figures["broadcast_cpu"] = max(0.0, both - figures["call_cpu"]) / several
            figures["unlinked"] = len(tree.unlinked())
            gc.collect()
            figures["rss"] = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            figures["fds"] = len(os.listdir("/proc/self/fd"))
            few = max(1, count // 100)
            figures["died_s"] = noticed(agents, "die", few)
            figures["muted_s"] = noticed(agents, "mute", few)
        finally:
            agents.close()
    return figures


def ignore(failure: MeshFailure) -> None:
    """Hosts die here on purpose."""


def show(rows: list[dict[str, float]]) -> None:
    """Print the table."""
    table = Table(*(title for title, _, _ in COLUMNS.values()))
    for row in rows:
        table.add_row(*(f"{row[name] * factor:,.{digits}f}" for name, (_, factor, digits) in COLUMNS.items()))
    Console(width=160 if not sys.stdout.isatty() else None).print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="8,64,512,4096", help="numbers of hosts (default: %(default)s)")
    parser.add_argument("--procs", type=int, default=8, help="procs per host (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="processes for the agents (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each figure is taken")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(
            "FIGURES", json.dumps(measure(options.one, options.procs, options.processes, options.seconds)), flush=True
        )
        os._exit(0)
    rows = []
    for count in map(int, options.hosts.split(",")):
        arguments = ["--one", str(count), "--procs", str(options.procs), "--processes", str(options.processes)]
        ended = subprocess.run(
            [sys.executable, __file__, *arguments, "--seconds", str(options.seconds)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SIZE_SECONDS,
            check=False,
        )
        found = [line for line in ended.stdout.splitlines() if line.startswith("FIGURES ")]
        if found:
            rows.append(json.loads(found[0].removeprefix("FIGURES ")))
        else:
            print(f"{count} hosts: status {ended.returncode}\n{ended.stderr[-2000:]}", file=sys.stderr)
    show(rows)
    if options.json is not None:
        about = {"python": platform.python_version(), "cpus": os.cpu_count(), "load": os.getloadavg()[0]}
        options.json.write_text(json.dumps({"about": about, "figures": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
