"""Hosts of a program that torchrun has started."""

from __future__ import annotations

from typing import Any

from monarch_slurm.actor import HostMesh
from monarch_slurm.job.spmd import StoreJob
from monarch_slurm.job.store_workers import StoreLike

__all__ = ["StoreLike", "host_mesh_from_store"]


def host_mesh_from_store(store: StoreLike, *, name: str = "monarch_worker", **options: Any) -> HostMesh | None:
    """Return the hosts of all nodes on rank 0, None on the others: `StoreJob.from_store`, and the mesh of its state."""
    job = StoreJob.from_store(store, name=name, **options)
    return None if job is None else getattr(job.state(), name)
