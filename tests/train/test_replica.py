"""The ranks of one replica, as processes: what each holds of the model, and what they can agree on.

Run as a program, this file is all ranks of one replica, forked from one process.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from monarch_slurm.actor import Actor, endpoint, this_host
from monarch_slurm.collectives import StoreActor

DEADLINE_S = 30.0
RANKS = 3  # does not divide the number of rows of most parameters


@pytest.mark.train
@pytest.mark.slow
def test_shards_are_parts_of_the_unsharded_model() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", *(f"rank {rank} is right" for rank in range(RANKS))]


class Rank(Actor):
    """One rank of a replica whose ranks meet in the keys of an actor."""

    @endpoint
    def opens(self, rank: int, store: StoreActor, knows_secret: bool) -> str:
        from monarch_slurm.collectives import torch_gloo
        from monarch_slurm.collectives.errors import ProofError
        from monarch_slurm.train.config import Place
        from monarch_slurm.train.replica import open_replica

        if not knows_secret:
            torch_gloo.agree_on_secret = lambda store: bytes(32)
        try:
            replica = open_replica(Place(0, rank, 2, 0, "", store=store), DEADLINE_S)
        except ProofError as error:
            return str(error)
        total = str(replica.sum([1.0]))
        replica.close()
        return total


@pytest.mark.parametrize("knows_secret", [True, False])
def test_a_rank_without_the_secret_gets_no_part_in_a_replica(knows_secret: bool) -> None:
    pytest.importorskip("torch")
    procs = this_host().spawn_procs({"rank": 2})
    store = procs.slice(rank=0).spawn("store", StoreActor)
    ranks = [procs.slice(rank=rank).spawn("rank", Rank) for rank in range(2)]
    opening = [each.opens.call_one(rank, store, knows_secret or rank == 0) for rank, each in enumerate(ranks)]
    found = [each.get(DEADLINE_S) for each in opening]
    if knows_secret:
        assert found == ["[2.0]", "[2.0]"]
    else:
        for rank, text in enumerate(found):
            assert text.startswith(f"rank {1 - rank} of 2 did not prove to rank {rank} of 2 on "), text
    procs.stop().get(DEADLINE_S)


def be_rank(rank: int, port: int) -> None:
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from monarch_slurm.train import state
    from monarch_slurm.train.config import Place
    from monarch_slurm.train.llama import Llama, init_parameters
    from monarch_slurm.train.llama_config import CONFIGS
    from monarch_slurm.train.replica import open_replica

    torch.set_num_threads(1)
    replica = open_replica(Place(0, rank, RANKS, 0, "", store_port=port), timeout=30)
    assert replica.sum([1.0, float(rank)]) == [3.0, 3.0]
    whole = Llama(CONFIGS["tiny"])
    init_parameters(whole, 5)
    with torch.device("meta"):
        sharded = Llama(CONFIGS["tiny"])
    for block in sharded.blocks:
        fully_shard(block, mesh=replica.mesh)
    fully_shard(sharded, mesh=replica.mesh)
    sharded.to_empty(device="cpu")
    init_parameters(sharded, 5)
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), whole.get_parameter(name))
    tokens = torch.arange(24).view(2, 12)
    torch.testing.assert_close(sharded(tokens), whole(tokens))

    # A snapshot holds this rank's part only, and becomes the same sharded tensor again.
    live = dict(sharded.state_dict())
    copy = state.snapshot(live)
    assert state.size(copy) < 4 * 353_952 / RANKS * 1.2
    assert state.digest(copy) == state.digest(live)
    with torch.no_grad():
        sharded.norm.weight.zero_()
    sharded.load_state_dict(state.restore(copy, state.meshes_of(sharded)))
    assert state.digest(dict(sharded.state_dict())) == state.digest(copy)
    os.write(1, f"rank {rank} is right\n".encode())
    replica.close()


def main() -> int:
    import monarch_slurm.train.engine  # noqa: F401  # once, for all ranks

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            be_rank(rank, port)
            os._exit(0)
        ranks.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in ranks)


if __name__ == "__main__":
    sys.exit(main())
