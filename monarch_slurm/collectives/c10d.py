"""torch.distributed's backend ``monarch``: GPU collectives on this package's communicators.

    import monarch_slurm.collectives.c10d
    torch.distributed.init_process_group("cpu:gloo,cuda:monarch", ...)

Importing this module registers the backend; its native part is built at the first process group. Each process must
have chosen its GPU (``torch.cuda.set_device``) before. A group joins at once, and runs on a stream of its own.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from monarch_slurm.collectives.ccl import CclTransport
from monarch_slurm.collectives.rendezvous import invite
from monarch_slurm.native_build import load_native

BACKEND = "monarch"
_streams: list[torch.cuda.Stream] = []  # as long-lived as the process: a group's last operations may still run


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    if rank == 0:
        store.set("unique_id", invite("ccl")[0].token)
    token = bytes(store.get("unique_id"))
    device = torch.device("cuda", torch.cuda.current_device())
    comm = CclTransport.join(token, rank, size, device, timeout.total_seconds()).comm
    stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    _streams.append(stream)
    return load_native("_c10d").create(rank, size, comm.capsule(), stream.stream_id, device.index, stream.cuda_stream)


def register() -> None:
    """Make torch.distributed know the backend; importing this module has done it. Again does nothing."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, devices=["cuda"])


register()
