"""The ranks of one replica, as processes: what each holds of the model, and what they can agree on.

Run as a program, this file is all ranks of one replica, forked from one process.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

RANKS = 3  # does not divide the number of rows of most parameters


@pytest.mark.train
@pytest.mark.slow
def test_shards_are_parts_of_the_unsharded_model() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", *(f"rank {rank} is right" for rank in range(RANKS))]


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
