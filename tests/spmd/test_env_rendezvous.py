"""Programs for torchrun meet at the job's store: nothing listens for their rendezvous."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from monarch_slurm.actor import this_host
from monarch_slurm.spmd import run_spmd

PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

def innermost(store):
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return type(store).__name__

def meet(**how):
    dist.init_process_group("gloo", **how)
    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    kind = innermost(dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    return f"{kind} {value.item()}"

found = [meet(), meet(init_method="env://"), meet(rank=int(os.environ["RANK"]), world_size=2)]
# A group of its own that the program makes from the variables is torch's affair.
size, rank = os.environ["WORLD_SIZE"], os.environ["RANK"]
os.environ["MASTER_ADDR"], os.environ["WORLD_SIZE"], os.environ["RANK"] = "127.0.0.1", "1", "0"
os.environ["MASTER_PORT"] = "0"
found.append(meet())
with open(os.path.join(sys.argv[1], rank), "w") as file:
    file.write(", ".join(found))
"""


def test_process_groups_of_the_environment_meet_at_the_store(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run_spmd(this_host(), [str(program), str(tmp_path)], nproc_per_node=2)
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == ", ".join(["JobStore 3.0"] * 3 + ["TCPStore 1.0"])


STRANGE = """
import os, sys
import torch.distributed as dist
import monarch_slurm.collectives.torch_gloo as torch_gloo

# What a process does that has come in the place of rank 1, and does not know the secret.
if os.environ["RANK"] == "1":
    torch_gloo.agree_on_secret = lambda store: bytes(32)
found = [os.environ["GLOO_SOCKET_IFNAME"]]
try:
    dist.init_process_group("gloo")
except Exception as error:
    found.append(f"{type(error).__name__} {error}")
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    file.write(", ".join(found))
"""


def test_a_rank_without_the_secret_of_the_job_gets_no_part(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(STRANGE)
    run_spmd(this_host(), [str(program), str(tmp_path)], nproc_per_node=2)
    for rank in range(2):
        found = (tmp_path / str(rank)).read_text()
        assert found.startswith(f"lo, ProofError rank {1 - rank} of 2 did not prove to rank {rank} of 2 on "), found
