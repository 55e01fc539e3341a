"""torch.distributed's backend ``monarch``: GPU collectives on this package's communicators.

    import monarch_slurm.collectives.c10d
    torch.distributed.init_process_group("cpu:gloo,cuda:monarch", ...)

Importing this module registers the backend; its native part is built at the first process group. Each process must
have chosen its GPU (``torch.cuda.set_device``) before. A group joins at once, and runs on a stream of its own.

A group that is made in an endpoint of an actor is told by the control plane when the process of a rank dies: within
milliseconds its operations end on the other ranks, and the next one raises ``torch.distributed.DistBackendError`` with
the rank and the reason. Elsewhere only what RCCL or NCCL find out themselves ends a group.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from monarch_slurm.actor.context import current_context
from monarch_slurm.collectives.ccl import CclTransport
from monarch_slurm.collectives.errors import PeerLostError
from monarch_slurm.collectives.peers import Membership, enroll
from monarch_slurm.collectives.rendezvous import invite
from monarch_slurm.native_build import load_native
from monarch_slurm.wire import Address

BACKEND = "monarch"
_streams: list[torch.cuda.Stream] = []  # as long-lived as the process: a group's last operations may still run
_groups: list[tuple[CclTransport, Membership]] = []


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    if rank == 0:
        store.set("unique_id", invite("ccl")[0].token)
    token = bytes(store.get("unique_id"))
    here = current_context()
    runtime = here.actor_instance.runtime if here is not None else None
    processes = _processes(store, rank, size, runtime)
    device = torch.device("cuda", torch.cuda.current_device())
    transport = CclTransport.join(token, rank, size, device, timeout.total_seconds())
    _tidy()
    _groups.append((transport, enroll(runtime, processes, lambda why, lost: transport.abort(PeerLostError(why, lost)))))
    stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    _streams.append(stream)
    comm = transport.comm.capsule()
    return load_native("_c10d").create(rank, size, comm, stream.stream_id, device.index, stream.cuda_stream)


def _processes(store: Any, rank: int, size: int, runtime: Any) -> list[Address | None]:
    """Return the control plane's address of each rank; None for those that are no actors' processes."""
    store.set(f"process{rank}", "\n".join(runtime.address) if runtime is not None else "")
    told = [bytes(store.get(f"process{each}")).decode() for each in range(size)]
    return [Address(*text.split("\n")) if text else None for text in told]


def _tidy() -> None:
    """Forget the groups that have ended."""
    for group in [group for group in _groups if group[0].comm.aborted]:
        group[1].end()
        _groups.remove(group)


def register() -> None:
    """Make torch.distributed know the backend; importing this module has done it. Again does nothing."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, devices=["cuda"])


register()
