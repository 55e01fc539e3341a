"""all_reduce of `monarch_slurm.collectives` beside torch.distributed's NCCL, on the same GPUs in the same run.

    python bench/collectives.py --json collectives.json --plot collectives.svg

Both run in the same two or more processes, one per GPU, in turns; a row gives the median time of an operation and the
bus bandwidth, ``2 (n - 1) / n * bytes / time``.

The last rows time making a communicator anew: ours is aborted and joined again, torch's is destroyed and initialized,
in turns. Both get their unique id through the same store of torch, which is there before, and are through when a first
all_reduce of 4 KiB is. The first turn is cold: what a library does once in a process is in it. A third kind of turn
joins only when the library has ended the aborted communicator in the background: what the two cost each other.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import plots
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from monarch_slurm.collectives import Communicator, Invitation, invite
from monarch_slurm.gpu import gpu_devices
from monarch_slurm.native_build import build_native

SIZES_BYTES = [1 << power for power in (10, 14, 18, 20, 22, 24, 26, 28, 30, 32)]
TURNS = 6


def seconds_each(call: Callable[[], Any], repeats: int, rounds: int) -> float:
    times: list[float] = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        dist.barrier()
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / repeats)
    return statistics.median(times)


def rank_main(rank: int, size: int, port: int, out: Any, invitation: Invitation) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    store = TCPStore("127.0.0.1", port, is_master=False)
    there = PrefixStore("first", store)
    dist.init_process_group("nccl", store=there, rank=rank, world_size=size, device_id=device)
    comm = Communicator.join(invitation, rank, size, device=device)
    rows: list[dict[str, Any]] = []
    for size_bytes in SIZES_BYTES:
        tensor = torch.zeros(size_bytes // 4, device=device)
        repeats = 200 if size_bytes <= 1 << 20 else 20 if size_bytes <= 1 << 28 else 5
        ours = [lambda: comm.all_reduce(tensor)]  # noqa: B023
        theirs = [lambda: dist.all_reduce(tensor)]  # noqa: B023
        for call in (*ours, *theirs):
            seconds_each(call, 5, 1)
        pairs = [(seconds_each(ours[0], repeats, 3), seconds_each(theirs[0], repeats, 3)) for _ in range(3)]
        mine, peer = (statistics.median(times) for times in zip(*pairs, strict=True))
        factor = 2 * (size - 1) / size * size_bytes / 1e9
        rows.append({"bytes": size_bytes, "us": mine * 1e6, "peer_us": peer * 1e6})
        rows[-1].update(bus_gb_s=factor / mine, peer_bus_gb_s=factor / peer, speed=peer / mine)
    turns = remake_turns(comm, store)
    if rank == 0:
        out.put({"rows": rows, "turns": turns})
    dist.destroy_process_group()
    os._exit(0)


def remake_turns(comm: Communicator, store: Any) -> list[dict[str, Any]]:
    """Make ours and torch's communicators anew in turns; returns the seconds of each part of each turn.

    Args:
        comm: ours; torch's is the default process group.
        store: where both sides' ranks meet.
    """
    rank, size, device = comm.rank, comm.size, comm.device
    on_gpu = device.type == "cuda"
    ours, theirs, bound_to = ("ccl", "nccl", device) if on_gpu else ("gloo", "gloo", None)
    tensor = torch.ones(1024, device=device)
    rows = []
    for turn in range(TURNS):
        for kind in ("ours", "torch", "ours, when the abort is through"):
            key = f"{turn} {kind}"
            comm.all_reduce(tensor).wait()
            dist.all_reduce(tensor)
            wait_for_aborts()  # of the turn before
            dist.barrier()
            if on_gpu:
                torch.cuda.synchronize()
            marks = [time.monotonic()]
            if kind == "torch":
                dist.destroy_process_group()
                marks.append(time.monotonic())
                there = PrefixStore(key, store)
                dist.init_process_group(theirs, store=there, rank=rank, world_size=size, device_id=bound_to)
                marks.append(time.monotonic())
                dist.all_reduce(tensor)
            else:
                comm.abort("measured")
                if kind != "ours":
                    wait_for_aborts()
                marks.append(time.monotonic())
                if rank == 0:
                    invitation, _kept = invite(ours)
                    store.set(key, invitation.token)
                comm = Communicator.join(Invitation(ours, store.get(key)), rank, size, device=device)
                marks.append(time.monotonic())
                comm.all_reduce(tensor).wait()
            if on_gpu:
                torch.cuda.synchronize()
            marks.append(time.monotonic())
            parts = dict(zip(("end_s", "make_s", "first_s"), (b - a for a, b in pairwise(marks)), strict=True))
            rows.append({"turn": turn, "kind": kind, **parts, "s": marks[-1] - marks[0]})
    comm.close()
    return rows


def wait_for_aborts() -> None:
    for thread in threading.enumerate():
        if thread.name.endswith("-abort"):
            thread.join()


def print_turns(turns: list[dict[str, Any]]) -> None:
    print(
        "making a communicator anew, seconds: in all = ending the old one + making the new one + its first all_reduce"
    )
    for row in turns:
        parts = " + ".join(f"{row[part]:.3f}" for part in ("end_s", "make_s", "first_s"))
        print(f"{'cold' if row['turn'] == 0 else 'warm'} {row['s']:7.3f} = {parts}  {row['kind']}")
    warm = {
        kind: statistics.median(row["s"] for row in turns if row["kind"] == kind and row["turn"] > 0)
        for kind in ("ours", "torch")
    }
    print(f"warm, medians: {warm['ours']:.3f} against {warm['torch']:.3f}, {warm['ours'] / warm['torch']:.2f} of it")


def plot(path: Path, gpus: int, rows: list[dict[str, Any]]) -> None:
    curves = [
        ("monarch_slurm", plots.OURS, [row["bus_gb_s"] for row in rows]),
        ("torch.distributed", plots.THEIRS, [row["peer_bus_gb_s"] for row in rows]),
    ]
    title = f"all_reduce of float32 among {gpus} GPUs: bus bandwidth, GB/s"
    plots.lines(path, title, [row["bytes"] for row in rows], curves)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="draw the bus bandwidths into this file (SVG)")
    parser.add_argument("--gpus", type=int, default=0, help="0: all")
    arguments = parser.parse_args()
    build_native(["_native"])
    size = arguments.gpus or len(gpu_devices())
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    invitation = invite("ccl")[0]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments_of = [(rank, size, store.port, out, invitation) for rank in range(size)]
    processes = [context.Process(target=rank_main, args=each, daemon=True) for each in arguments_of]
    for process in processes:
        process.start()
    result = out.get(timeout=400)
    for process in processes:
        process.join(30)
    print(f"all_reduce float32, {size} GPUs ({torch.cuda.get_device_name(0)}), torch {torch.__version__}")
    print(f"{'bytes':>12} {'us':>10} {'torch us':>10} {'bus GB/s':>9} {'torch':>9} {'speed':>6}")
    for row in result["rows"]:
        numbers = f"{row['us']:10.1f} {row['peer_us']:10.1f} {row['bus_gb_s']:9.2f} {row['peer_bus_gb_s']:9.2f}"
        print(f"{row['bytes']:>12} {numbers} {row['speed']:6.2f}")
    print_turns(result["turns"])
    if arguments.json:
        arguments.json.write_text(json.dumps({"gpus": size, "torch": torch.__version__, **result}, indent=1))
    if arguments.plot:
        plot(arguments.plot, size, result["rows"])


if __name__ == "__main__":
    main()
