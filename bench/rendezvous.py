"""How long a gloo group takes to form over a JobStore, beside a TCPStore, in processes of this machine.

    python bench/rendezvous.py [--ranks 4] [--rounds 30] [--json FILE]

The same procs form group after group, over the one and the other store in turns. Over a JobStore the ranks prove to
each other that they are of the job; a third kind leaves that out, which shows what it costs. The time of a round is
that of its slowest rank, from a new store (its actor spawned, or its port opened and dialled) to the group that is
made. Trust the ratio, not the figures: what else the machine does falls on all alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import timedelta
from typing import Any

from monarch_slurm.actor import Actor, endpoint, this_host
from monarch_slurm.collectives import StoreActor

TIMEOUT = timedelta(seconds=120)
_JOB, _NO_PROOF, _TCP = "JobStore", "JobStore without proof", "TCPStore"


class Rank(Actor):
    """One rank of each group."""

    def __init__(self, rank: int, size: int) -> None:
        import torch.distributed as dist

        self._dist: Any = dist
        self._place = {"rank": rank, "world_size": size}
        self._tcp: Any = None

    @endpoint
    def serve(self) -> int:
        """Open a TCPStore; return its port."""
        size = self._place["world_size"]
        self._tcp = self._dist.TCPStore(
            "127.0.0.1", 0, world_size=size, is_master=True, wait_for_workers=False, timeout=TIMEOUT
        )
        return int(self._tcp.port)

    @endpoint
    def form(self, where: Any, with_proof: bool) -> float:
        """Form a group at a port or a store's actor; return how many seconds it took."""
        from monarch_slurm.collectives.job_store import JobStore

        began = time.perf_counter()
        if isinstance(where, int):
            store = self._tcp
            if store is None:
                store = self._dist.TCPStore("127.0.0.1", where, is_master=False, timeout=TIMEOUT)
        else:
            store = JobStore(where, TIMEOUT)
            if not with_proof:
                self._dist.distributed_c10d.ProcessGroupGloo = self._dist.ProcessGroupGloo
        self._dist.init_process_group("gloo", store=store, timeout=TIMEOUT, **self._place)
        took = time.perf_counter() - began
        self._dist.barrier()  # a rank that leaves at once may break the connecting of others
        self._dist.destroy_process_group()
        self._tcp = None
        return took


def main() -> None:
    """Measure, and print a line per kind of store."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json")
    options = parser.parse_args()
    procs = this_host().spawn_procs({"rank": options.ranks})
    firsts = procs.slice(rank=0)
    ranks = [procs.slice(rank=rank).spawn("ranks", Rank, rank, options.ranks) for rank in range(options.ranks)]
    seconds: dict[str, list[float]] = {_JOB: [], _NO_PROOF: [], _TCP: []}
    for number in range(options.rounds + 1):
        for kind, samples in seconds.items():
            began = time.perf_counter()
            where = ranks[0].serve.call_one().get() if kind == _TCP else firsts.spawn("store", StoreActor)
            opened = time.perf_counter() - began
            forming = [rank.form.call_one(where, kind == _JOB) for rank in ranks]
            took = opened + max(each.get() for each in forming)
            if kind != _TCP:
                where.stop().get()
            if number:  # the first of each imports and connects what the others find
                samples.append(took)
    procs.stop().get()
    medians = {kind: statistics.median(samples) for kind, samples in seconds.items()}
    for kind, samples in seconds.items():
        worst = max(samples) * 1e3
        print(f"{kind}: median {medians[kind] * 1e3:.1f} ms, worst {worst:.1f} ms of {len(samples)} groups")
    print(
        f"ratio {medians[_JOB] / medians[_TCP]:.2f}, of the proof {(medians[_JOB] - medians[_NO_PROOF]) * 1e3:.1f} ms"
    )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(seconds, file)


if __name__ == "__main__":
    main()
