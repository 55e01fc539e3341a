"""How fast buffers move, beside the plain tool for the same work in the same run: memcpy, iperf3, ib_write_bw.

    python bench/rdma.py [host] [tcp] [verbs] [gpu] [--json FILE] [--plot FILE] [--torchmonarch PYTHON]

``host``: ``read_into`` between two processes of this machine, against memcpy of as many bytes in one thread; with the
interpreter of an environment that has torchmonarch, against its TCP backend, too.
``tcp``: the TCP engine over loopback against ``iperf3`` with as many streams.
``gpu``: ``read_into`` between the memory of two GPUs (of one, if there is one) that two processes own, against torch's
copy between the two in one process.
``verbs``: where there is an RDMA device (``RDMA_DEV`` and ``RDMA_GID`` name another than perftest takes), 16 MiB one
after the other against ``ib_write_bw`` and ``ib_read_bw``. Every figure is the median of its runs, with the spread; the
two sides take turns.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plots

from monarch_slurm.actor import Actor, endpoint, this_host
from monarch_slurm.config import configure
from monarch_slurm.rdma import RDMABuffer, recent_transfers, shared_memory

MIB = 2**20


class Peer(Actor):
    """Owns buffers, or reads those of another."""

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}

    @endpoint
    def make(self, nbytes: int, shared: bool) -> RDMABuffer:
        view = shared_memory(nbytes) if shared else memoryview(bytearray(nbytes))
        view[:] = os.urandom(MIB) * (nbytes // MIB)
        self.kept[nbytes] = view
        return RDMABuffer(view)

    @endpoint
    def copy(self, buffer: RDMABuffer, runs: int, write: bool) -> tuple[list[float], list[float], str]:
        """Return seconds of transfers and of memcpys, taking turns, and the backend."""
        nbytes = buffer.size()
        here, other = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
        addresses = [ctypes.addressof((ctypes.c_char * nbytes).from_buffer(view)) for view in (here, other)]
        moved: Callable[[memoryview], Any] = buffer.write_from if write else buffer.read_into

        def move() -> None:
            moved(here).get()

        move()
        ctypes.memmove(addresses[1], addresses[0], nbytes)
        ours, plain = [], []
        for _ in range(runs):
            ours.append(timed(move))
            plain.append(timed(lambda: ctypes.memmove(addresses[1], addresses[0], nbytes)))
        return ours, plain, recent_transfers()[-1].backend


class GpuPeer(Actor):
    """Owns memory of a GPU, or reads that of another."""

    def __init__(self, device: int) -> None:
        import torch

        self.torch = torch
        torch.cuda.set_device(device)
        self.kept: Any = None

    @endpoint
    def make(self, nbytes: int) -> RDMABuffer:
        self.kept = self.torch.ones(nbytes, dtype=self.torch.uint8, device="cuda")
        self.torch.cuda.synchronize()
        return RDMABuffer(self.kept)

    @endpoint
    def copy(self, buffer: RDMABuffer, owner: int, runs: int) -> tuple[list[float], list[float], str]:
        """As `Peer.copy`; the plain copy is between memory of this process on the owner's device and on this one's."""
        torch = self.torch
        target = torch.zeros(buffer.size(), dtype=torch.uint8, device="cuda")
        source = torch.ones(buffer.size(), dtype=torch.uint8, device=f"cuda:{owner}")

        def plain() -> None:
            target.copy_(source)
            torch.cuda.synchronize()

        def move() -> None:
            buffer.read_into(target).get()

        ours, theirs = [], []
        move()
        plain()
        for _ in range(runs):
            ours.append(timed(move))
            theirs.append(timed(plain))
        return ours, theirs, recent_transfers()[-1].backend


def timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def row(name: str, nbytes: int, ours: list[float], plain: list[float], against: str) -> dict[str, Any]:
    """Return one line of the table; rates in GB/s (10**9 bytes)."""
    rate = [nbytes / seconds / 1e9 for seconds in ours]
    other = [nbytes / seconds / 1e9 for seconds in plain]
    mine, theirs = statistics.median(rate), statistics.median(other)
    return {
        "what": name, "MiB": nbytes / MIB, "GB/s": round(mine, 3), "spread": f"{min(rate):.2f}-{max(rate):.2f}",
        "against": against, "its GB/s": round(theirs, 3), "ratio": round(mine / theirs, 3),
    }  # fmt: skip


def pair(transports: str) -> tuple[Any, Any]:
    def bootstrap() -> None:
        configure(rdma_transports=transports)

    peers = this_host().spawn_procs(per_host={"procs": 2}, bootstrap=bootstrap).spawn("peer", Peer)
    return peers.slice(procs=0), peers.slice(procs=1)


def torchmonarch(nbytes: int, runs: int, python: str) -> list[float]:
    """Return seconds of its ``read_into``."""
    program = [python, str(Path(__file__).parent / "runtimes" / "monarch_rdma.py"), str(nbytes), str(runs)]
    done = subprocess.run(program, check=True, capture_output=True, text=True)
    return [float(seconds) for seconds in json.loads(done.stdout.splitlines()[-1])]


def host(runs: int, python: str) -> list[dict[str, Any]]:
    rows = []
    sizes = (64 * MIB, 256 * MIB)
    theirs = {size: torchmonarch(size, runs, python) for size in sizes if python}
    for shared, transports in ((True, "shm,process_vm"), (False, "process_vm")):
        owner, user = pair(transports)
        for size in sizes:
            buffer = owner.make.call_one(size, shared).get()
            ours, plain, backend = user.copy.call_one(buffer, runs, False).get()
            rows.append(row(f"read_into, {backend}", size, ours, plain, "memcpy"))
            if python:
                rows.append(row(f"read_into, {backend}", size, ours, theirs[size], "torchmonarch, TCP"))
    return rows


def tcp(runs: int) -> list[dict[str, Any]]:
    size, streams = 1024 * MIB, 4
    owner, user = pair("tcp")
    buffer = owner.make.call_one(size, False).get()
    if shutil.which("iperf3") is None:
        raise SystemExit("iperf3 is missing: apt-get install iperf3")
    ours, plain = [], []
    for _ in range(runs):
        ours += user.copy.call_one(buffer, 1, False).get()[0]
        server = subprocess.Popen(["iperf3", "-s", "-1", "-p", "5299", "--forceflush"], stdout=subprocess.PIPE)
        assert server.stdout is not None
        server.stdout.readline()
        server.stdout.readline()
        client = ["iperf3", "-c", "127.0.0.1", "-p", "5299", "-P", str(streams), "-n", str(size), "-J"]
        got = json.loads(subprocess.run(client, check=True, capture_output=True, text=True).stdout)["end"][
            "sum_received"
        ]
        server.communicate()
        plain.append(size / (got["bits_per_second"] / 8))
    return [row("read_into, tcp", size, ours, plain, f"iperf3 -P {streams}")]


def gpu(runs: int) -> list[dict[str, Any]]:
    from monarch_slurm.gpu import gpu_devices

    last = len(gpu_devices()) - 1
    procs = this_host().spawn_procs(per_host={"procs": 2})
    owner = procs.slice(procs=0).spawn("owner", GpuPeer, 0)
    user = procs.slice(procs=1).spawn("user", GpuPeer, last)
    rows = []
    for size in (MIB, 64 * MIB, 1024 * MIB):
        buffer = owner.make.call_one(size).get()
        ours, plain, backend = user.copy.call_one(buffer, 0, runs).get()
        rows.append(row(f"read_into, {backend}, GPU 0 to {last}", size, ours, plain, "torch copy_"))
    return rows


def perftest(tool: str, size: int, messages: int) -> float:
    """Return the seconds that each message takes ``tool``, between two processes of this machine."""
    options = [tool, "-s", str(size), "-n", str(messages), "-F"]
    options += ["-d", os.environ["RDMA_DEV"]] if "RDMA_DEV" in os.environ else []
    options += ["-x", os.environ["RDMA_GID"]] if "RDMA_GID" in os.environ else []
    # It tells a pipe nothing before it ends, unless it is made to.
    server = subprocess.Popen(["stdbuf", "-oL", *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        if "Waiting for client" in line:
            break
    text = subprocess.run([*options, "localhost"], check=True, capture_output=True, text=True).stdout
    server.communicate()
    average = next(line.split() for line in text.splitlines() if line.split()[:1] == [str(size)])[3]
    return size / (float(average) * MIB)


def verbs(runs: int) -> list[dict[str, Any]]:
    size, messages = 16 * MIB, 5
    configure(host_spawn_ready_timeout=300.0, proc_start_timeout=300.0)  # an emulated machine takes its time
    owner, user = pair("ibverbs")
    buffer = owner.make.call_one(size, False).get()
    rows = []
    for name, tool, write in (("write_from", "ib_write_bw", True), ("read_into", "ib_read_bw", False)):
        ours, plain = [], []
        for _ in range(runs):
            times, _, backend = user.copy.call_one(buffer, messages, write).get()
            ours.append(statistics.mean(times))
            plain.append(perftest(tool, size, messages))
        rows.append(row(f"{name}, {backend}", size, ours, plain, tool))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["host", "tcp"], choices=["host", "tcp", "gpu", "verbs"])
    parser.add_argument("--runs", type=int, default=7, help="of each figure")
    parser.add_argument("--torchmonarch", metavar="PYTHON", default="", help="interpreter that has torchmonarch")
    parser.add_argument("--json", help="write the figures to this file, too")
    parser.add_argument("--plot", type=Path, help="draw them into this file (SVG)")
    arguments = parser.parse_args()
    rows = []
    for what in arguments.what:
        rows += {"host": lambda runs: host(runs, arguments.torchmonarch), "tcp": tcp, "gpu": gpu, "verbs": verbs}[what](
            arguments.runs
        )
    names = list(rows[0])
    widths = [max(len(name), *(len(str(line[name])) for line in rows)) for name in names]
    for cells in [names, *([str(line[name]) for name in names] for line in rows)]:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    if arguments.json:
        facts = {"python": sys.version.split()[0], "kernel": platform.release(), "cpus": os.cpu_count(), "rows": rows}
        with open(arguments.json, "w") as file:
            json.dump(facts, file, indent=2)
    if arguments.plot:
        pairs = [
            (f"{line['what']}, {line['MiB']:g} MiB", line["GB/s"], line["against"], line["its GB/s"]) for line in rows
        ]
        plots.bars(arguments.plot, "Moving buffers", "GB/s", pairs)


if __name__ == "__main__":
    main()
