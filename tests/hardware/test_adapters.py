"""What only an RDMA adapter can show: transfers of host and GPU memory through it. See site/rdma.md for the command."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from rdma.actors import Holder, digest, pattern

from monarch_slurm.actor import Actor, ProcMesh, endpoint, this_host
from monarch_slurm.rdma import get_rdma_backend

pytestmark = pytest.mark.hardware
if os.environ.get("MONARCH_SLURM_TEST_HARDWARE") != "1":
    pytest.skip(
        "needs an RDMA adapter; run: MONARCH_SLURM_TEST_HARDWARE=1 pytest tests/hardware", allow_module_level=True
    )

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench" / "gpu"))
SIZES = [1, 4097, (64 << 20) + 3, 1 << 30]


class Ways(Actor):
    """Tells by which ways the adapter of its process did not take GPU memory."""

    @endpoint
    def refused(self) -> dict[str, str]:
        from monarch_slurm.rdma.verbs import verbs_host

        host = verbs_host()
        assert host is not None
        print(f"{host.port} is used")
        return host.gpu_direct._refused


def only_ibverbs() -> None:
    from monarch_slurm.config import configure

    configure(rdma_transports="ibverbs,local")


@pytest.fixture
def procs() -> Iterator[Callable[[int], ProcMesh]]:
    assert get_rdma_backend() == "ibverbs", "no RDMA adapter with an active port, or no headers of libibverbs"
    meshes: list[ProcMesh] = []

    def spawn(count: int) -> ProcMesh:
        meshes.append(this_host().spawn_procs(per_host={"procs": count}, bootstrap=only_ibverbs))
        return meshes[-1]

    yield spawn
    for mesh in meshes:
        mesh.stop().get(20)


def test_host_memory(procs: Callable[[int], ProcMesh]) -> None:
    holders = procs(2).spawn("holder", Holder)
    owner, user = holders.slice(procs=0), holders.slice(procs=1)
    for index, size in enumerate(SIZES):
        buffer = owner.make.call_one(size, index).get(60)
        assert user.read.call_one(buffer).get(60) == (digest(pattern(size, index)), "ibverbs")
        assert user.write.call_one(buffer, size, index + 100).get(60) == "ibverbs"
        assert owner.digest_of.call_one(index).get(60) == digest(pattern(size, index + 100))


@pytest.mark.parametrize("expandable", [False, True])
def test_gpu_memory_without_the_hosts(procs: Callable[[int], ProcMesh], expandable: bool) -> None:
    meshes: Any = import_module("meshes")
    mesh = procs(2)
    last = len(import_module("hardware").gpu_devices()) - 1
    assert last >= 0, "this machine has no GPU that the kernel tells of"
    owner = mesh.slice(procs=0).spawn("owner", meshes.Holder, 0, expandable)
    user = mesh.slice(procs=1).spawn("user", meshes.Holder, last, expandable)
    ways = mesh.spawn("ways", Ways)
    for index, size in enumerate(SIZES):
        buffer = owner.make.call_one(size).get(60)
        assert user.exchange.call_one(buffer).get(60) == "ibverbs"
        assert owner.holds.call_one(index, 2).get(60)
    refused = [answer for _, answer in ways.refused.call().get(60)]
    assert refused == [{}, {}], "GPU memory was reached, but not by dmabuf"
