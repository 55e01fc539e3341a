"""all_reduce of `monarch_slurm.collectives` beside torch.distributed's NCCL, on the same GPUs in the same run.

    python bench/collectives.py --json collectives.json --plot collectives.svg

Both run in the same two or more processes, one per GPU, in turns; a row gives the median time of an operation and the
bus bandwidth, ``2 (n - 1) / n * bytes / time``. The last rows time making a communicator anew after an abort.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plots
import torch
import torch.distributed as dist

from monarch_slurm.collectives import Communicator, invite
from monarch_slurm.gpu import gpu_devices
from monarch_slurm.native_build import build_native

SIZES_BYTES = [1 << power for power in (10, 14, 18, 20, 22, 24, 26, 28, 30, 32)]


def seconds_each(call: Callable[[], Any], repeats: int, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        dist.barrier()
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / repeats)
    return statistics.median(times)


def rank_main(rank: int, size: int, store: str, out: Any, invitations: list[Any]) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=size, device_id=device)
    comm = Communicator.join(invitations[0], rank, size, device=device)
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
        del tensor
    tensor = torch.ones(1024, device=device)
    remade = []
    for invitation in invitations[1:]:
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.monotonic()
        comm.abort("measured")
        comm = Communicator.join(invitation, rank, size, device=device)
        comm.all_reduce(tensor)
        torch.cuda.synchronize()
        remade.append(time.monotonic() - begin)
    comm.close()
    anew = []
    for turn in range(len(remade)):
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        begin = time.monotonic()
        dist.destroy_process_group()
        place = f"file://{store}{turn}"
        dist.init_process_group("nccl", init_method=place, rank=rank, world_size=size, device_id=device)
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        anew.append(time.monotonic() - begin)
    if rank == 0:
        out.put({"rows": rows, "remake_s": remade, "peer_remake_s": anew})
    dist.destroy_process_group()
    os._exit(0)


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
    invitations = [invite("ccl")[0] for _ in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        arguments_of = [(rank, size, f"{folder}/store", out, invitations) for rank in range(size)]
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
    for name in ("remake_s", "peer_remake_s"):
        print(f"{name:<14} {' '.join(f'{value:.3f}' for value in result[name])}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"gpus": size, "torch": torch.__version__, **result}, indent=1))
    if arguments.plot:
        plot(arguments.plot, size, result["rows"])


if __name__ == "__main__":
    main()
