"""How fast large payloads travel, beside memcpy and torchmonarch on one host, and beside iperf3 between two.

    python bench/payloads.py [--torchmonarch PYTHON] [--sizes 64,256,1024] [--passes 3] [--json FILE]
    python bench/payloads.py --hosts [--sizes 1024]              # root, iperf3: makes two network namespaces

On one host the runtimes take turns, in programs of their own (``bench/runtimes/payload_api.py``). Each figure is the
best of all passes, since what else a machine does only ever costs time; a small call's is the 99th percentile. Trust
the ratios of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

PROGRAM = Path(__file__).parent / "runtimes" / "payload_api.py"
PROGRAM_SECONDS = 1800
MIB = 2**20
NETWORK = f"10.213.{os.getpid() % 250}"
IPERF_SECONDS = 5

Figures = dict[str, list[float]]


def measure(python: str, module: str, parts: str, sizes: str) -> Figures:
    """Run the program of one runtime; return the seconds of each figure."""
    environment = {**os.environ, "PAYLOADS_API": module}
    ended = subprocess.run(
        [python, str(PROGRAM), parts, sizes],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=False, env=environment,
    )  # fmt: skip
    figures: Figures = {}
    for line in ended.stdout.splitlines():
        if line.startswith("FIGURES "):
            figures.update(json.loads(line.removeprefix("FIGURES ")))
    if ended.returncode:
        print(f"{module} ended with status {ended.returncode}:\n{ended.stderr[-2000:]}", file=sys.stderr)
    return figures


def value(name: str, seconds: list[float]) -> tuple[float, str]:
    """Return a figure and its unit."""
    if name.startswith("small"):
        return 1000 * sorted(seconds)[int(0.99 * len(seconds))], "ms (99 %)"
    return int(name.rpartition(" ")[2]) * MIB / 1e6 / min(seconds), "MB/s"


def one_host(options: argparse.Namespace) -> list[dict[str, object]]:
    """Measure on one host; return the rows of the table."""
    ours: Figures = {}
    theirs: Figures = {}
    for _ in range(options.passes):
        pairs = [(ours, sys.executable, "monarch_slurm.actor", "copies,kinds,small")]
        if options.torchmonarch:
            pairs.append((theirs, options.torchmonarch, "monarch.actor", "kinds,small"))
        for found, python, module, parts in pairs:
            for name, seconds in measure(python, module, parts, options.sizes).items():
                found.setdefault(name, []).extend(seconds)
    rows: list[dict[str, object]] = []
    first = options.sizes.partition(",")[0]
    for name, seconds in ours.items():
        figure, unit = value(name, seconds)
        row: dict[str, object] = {"figure": f"{name} MiB", "unit": unit, "here": figure}
        if name in theirs:
            row["torchmonarch"] = value(name, theirs[name])[0]
            row["of torchmonarch"] = figure / value(name, theirs[name])[0]
        direction, _, rest = name.partition(" ")
        if direction in ("there", "back"):
            array = value(f"x {first}", ours[f"{direction} numpy array {first}"])[0]
            copy = f"memcpy into new memory {rest.rpartition(' ')[2]}"
            row["of the array of the first size"] = figure / array
            row["of memcpy"] = figure / value(copy, ours[copy])[0]
        rows.append(row)
    return rows


@contextmanager
def namespace(name: str) -> Iterator[list[str]]:
    """Make a network namespace that is cabled to this one; give the command that runs another in it."""

    def run(*command: str) -> None:
        subprocess.run(command, check=True)

    run("ip", "netns", "add", name)
    try:
        run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "addr", "add", f"{NETWORK}.1/24", "dev", name)
        run("ip", "link", "set", name, "up")
        for command in (f"addr add {NETWORK}.2/24 dev eth0", "link set eth0 up", "link set lo up"):
            run("ip", "-n", name, *command.split())
        yield ["ip", "netns", "exec", name]
    finally:
        run("ip", "netns", "del", name)


def iperf(inside: list[str], stack: ExitStack) -> float:
    """Return the bytes per second of one stream of iperf3 into the namespace."""
    server = subprocess.Popen([*inside, "iperf3", "-s", "-1", "--forceflush"], stdout=subprocess.PIPE, text=True)
    stack.callback(server.kill)
    assert server.stdout is not None
    while "listening" not in server.stdout.readline():
        pass
    client = ["iperf3", "-c", f"{NETWORK}.2", "-t", str(IPERF_SECONDS), "-J"]
    answer = json.loads(subprocess.run(client, capture_output=True, text=True, check=True).stdout)
    return float(answer["end"]["sum_received"]["bits_per_second"]) / 8


def two_hosts(options: argparse.Namespace) -> list[dict[str, object]]:
    """Measure between this namespace, where the program is, and an agent in another; return the rows of the table."""
    sys.path.insert(0, str(PROGRAM.parent))
    import payload_api

    from monarch_slurm.controller import gather_hosts, publish

    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        inside = stack.enter_context(namespace(f"payloads{os.getpid()}"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "job"
        publish(folder, address=f"{NETWORK}.1")
        # In a PID namespace of its own the agent knows that it is on another machine.
        agent = [sys.executable, "-m", "monarch_slurm.host", "--folder", str(folder), "--name", "other"]
        environment = {**os.environ, "PYTHONPATH": str(PROGRAM.parent)}
        within = [*inside, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        process = subprocess.Popen([*within, *agent], env=environment)
        stack.callback(process.wait)
        stack.callback(process.kill)  # unshare ignores SIGTERM
        hosts = gather_hosts(["other"], timeout=120)
        procs = hosts.spawn_procs(per_host={"procs": 2})
        echoes = [procs.slice(procs=place).spawn(f"echo{place}", payload_api.Echo) for place in range(2)]
        streams = []
        best: dict[str, list[float]] = {}
        for _ in range(options.passes):  # in turns
            streams.append(iperf(inside, stack))
            for size in map(int, options.sizes.split(",")):
                for name, data in payload_api.payloads(size * MIB):
                    if re.search("array$|tensor$|bytes$", name):
                        take = best.setdefault(f"there {name} {size}", [])
                        take += payload_api.seconds(lambda data=data: echoes[0].take.call_one(data).get(), 2)  # type: ignore[misc]
                        back = best.setdefault(f"back {name} {size}", [])
                        back += payload_api.seconds(lambda: echoes[0].give.call_one().get(), 2)
        sizes = [int(size) * MIB for size in options.sizes.split(",")]
        best.update(payload_api.small(sizes, *echoes))
        rows.append({"figure": "iperf3, one stream", "unit": "MB/s", "here": max(streams) / 1e6})
        for name, seconds in best.items():
            figure, unit = value(name, seconds)
            ratio = {} if name.startswith("small") else {"of iperf3": figure * 1e6 / max(streams)}
            rows.append({"figure": f"{name} MiB", "unit": unit, "here": figure, **ratio})
        hosts.shutdown().get(60)
    return rows


def show(rows: list[dict[str, object]]) -> None:
    """Print the table."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*columns)
    for row in rows:
        cells = [row.get(column, "") for column in columns]
        table.add_row(
            *(
                f"{cell:.2f}"
                if isinstance(cell, float) and cell < 100
                else f"{cell:,.0f}"
                if isinstance(cell, float)
                else str(cell)
                for cell in cells
            )
        )
    Console(width=160 if not sys.stdout.isatty() else None).print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchmonarch", metavar="PYTHON", help="a Python that has torchmonarch, torch and numpy")
    parser.add_argument("--hosts", action="store_true", help="measure between two hosts instead")
    parser.add_argument("--sizes", default="64,256,1024", help="MiB, the largest last (default: %(default)s)")
    parser.add_argument("--passes", type=int, default=3, help="how often all is measured (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    began = time.time()
    rows = two_hosts(options) if options.hosts else one_host(options)
    show(rows)
    if options.json is not None:
        about = {"cpus": os.cpu_count(), "load": os.getloadavg(), "seconds": time.time() - began}
        options.json.write_text(json.dumps({"about": about, "figures": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
