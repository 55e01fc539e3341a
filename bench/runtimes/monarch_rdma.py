"""Seconds of torchmonarch's ``read_into`` between two processes, over its TCP backend: ``monarch_rdma.py NBYTES RUNS``.

For `bench/rdma.py`, which runs it with the interpreter of torchmonarch's environment; prints a JSON list.
"""

import json
import sys
import time
import warnings

from monarch.actor import Actor, endpoint, this_host
from monarch.rdma import RDMABuffer, get_rdma_backend


class Peer(Actor):
    """Owns a buffer, or reads that of another."""

    @endpoint
    def make(self, nbytes: int) -> RDMABuffer:
        self.kept = memoryview(bytearray(b"\1") * nbytes)
        return RDMABuffer(self.kept)

    @endpoint
    def copy(self, buffer: RDMABuffer, runs: int) -> list[float]:
        assert get_rdma_backend() == "tcp"
        target = memoryview(bytearray(buffer.size()))
        buffer.read_into(target, timeout=300).get()
        seconds = []
        for _ in range(runs):
            start = time.perf_counter()
            buffer.read_into(target, timeout=300).get()
            seconds.append(time.perf_counter() - start)
        assert target[-1] == 1
        return seconds


def main() -> None:
    warnings.simplefilter("ignore")
    peers = this_host().spawn_procs(per_host={"procs": 2}).spawn("peer", Peer)
    buffer = peers.slice(procs=0).make.call_one(int(sys.argv[1])).get()
    print(json.dumps(peers.slice(procs=1).copy.call_one(buffer, int(sys.argv[2])).get()), flush=True)


if __name__ == "__main__":
    main()
