"""What the ranks of one replica share: a store, a device mesh, and the device that each computes on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from monarch_slurm.collectives.job_store import JobStore
from monarch_slurm.train.addresses import interface_of, listen
from monarch_slurm.train.config import Place


@dataclass
class Replica:
    """This rank's share of its replica; close it when the trainer ends.

    Attributes:
        device: where the rank computes.
        port: of the replica's TCP store, which rank 0 serves on its own address only; 0 if the ranks meet in the keys
            of an actor.
        mesh: the ranks as a one-dimensional mesh that parameters are sharded over; None if there is one rank.
        store: the replica's, which ends when nothing refers to it any more.
    """

    device: torch.device
    port: int
    mesh: DeviceMesh | None
    store: Store | None = None

    def sum(self, values: list[float]) -> list[float]:
        """Return the sums of ``values`` over the ranks; every rank has to call it."""
        if self.mesh is None:
            return values
        totals = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(totals, group=self.mesh.get_group())
        return [float(total) for total in totals.tolist()]

    def close(self) -> None:
        """Leave the replica's process group, if there is one."""
        if self.mesh is not None:
            dist.destroy_process_group()


def open_replica(place: Place, timeout: float, *, always_group: bool = False) -> Replica:
    """Meet the other ranks of the replica.

    With one rank this takes no time and starts no process group, unless ``always_group`` asks for one, which then is
    for host memory, too. With more, all of them have to come within ``timeout`` seconds, which also bounds the
    replica's own collectives: NCCL (RCCL on AMD) on GPUs, Gloo on the CPU.

    Raises:
        ConfigError: ``place`` names addresses that this host does not have, or the store's port is taken.
        torch.distributed.DistError: a rank did not come.
        ProofError: a rank of a Gloo group did not prove that it belongs to the replica. At a TCP store none has to.
    """
    device = _device(place)
    wait = timedelta(seconds=timeout)
    store: Store
    if place.store is not None:
        if place.world_size == 1 and not always_group:
            return Replica(device, 0, None)
        store = PrefixStore("replica", JobStore(place.store, wait))
    elif place.world_size == 1:
        store = _serve_store(place.address, 0, 1, wait)
        if not always_group:
            return Replica(device, store.port, None, store)
    elif place.rank == 0:
        store = _serve_store(place.store_address, place.store_port, place.world_size, wait)
    else:
        store = TCPStore(place.store_address, place.store_port, timeout=wait, wait_for_workers=False)
    # Both libraries choose by interface, not by address. What the user has set, stays.
    interface = interface_of(place.address)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without "=" it is a prefix
    dist.init_process_group(
        ("cpu:gloo,cuda:nccl" if always_group else "cuda:nccl") if device.type == "cuda" else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=wait,
        device_id=device if device.type == "cuda" else None,
    )
    mesh = init_device_mesh(device.type, (place.world_size,))
    return Replica(device, store.port if isinstance(store, TCPStore) else 0, mesh, store)


def _device(place: Place) -> torch.device:
    """Return the accelerator of this rank ("cuda" is HIP too on AMD), or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # A launcher that shows each rank only its own GPU leaves one to count from.
    device = torch.device("cuda", place.device % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _serve_store(address: str, port: int, ranks: int, timeout: timedelta) -> TCPStore:
    # Left to itself the store would listen on every interface; it takes a socket that already listens instead.
    server = listen(address, port)
    return TCPStore(
        address,
        server.getsockname()[1],
        world_size=ranks,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=server.detach(),
    )
