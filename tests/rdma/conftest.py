"""Two procs whose transfers use the backend that the test names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch_slurm.actor import ProcMesh, this_host
from rdma.actors import Holder

TRANSPORTS = {"process_vm": "process_vm", "shm": "shm,process_vm", "tcp": "tcp", "ibverbs": "ibverbs"}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="no RDMA device")
        yield


@pytest.fixture
def spawn() -> Iterator[Callable[..., Any]]:
    """Return a function that spawns `Holder` in ``count`` procs of one backend."""
    meshes: list[ProcMesh] = []

    def make(count: int, backend: str, transports: str = "") -> Any:
        def bootstrap(transports: str = transports or TRANSPORTS[backend]) -> None:
            from monarch_slurm.config import configure

            configure(rdma_transports=transports + ",local")

        procs = this_host().spawn_procs(per_host={"procs": count}, bootstrap=bootstrap)
        meshes.append(procs)
        return procs.spawn("holder", Holder)

    yield make
    for mesh in meshes:
        mesh.stop().get(20)
