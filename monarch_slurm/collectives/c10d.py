"""torch.distributed's backend ``monarch``: GPU collectives on this package's communicators.

    import monarch_slurm.collectives.c10d
    torch.distributed.init_process_group("cpu:gloo,cuda:monarch", ...)

Importing this module registers the backend; its native part is built at the first process group. Each process must
have chosen its GPU (``torch.cuda.set_device``) before. A group joins at once, and runs on a stream of its own.

A group that is made in an endpoint of an actor is told by the control plane when the process of a rank dies: within
milliseconds its operations end on the other ranks, and the next one raises ``torch.distributed.DistBackendError`` with
the rank and the reason. Elsewhere a group is ended by what RCCL or NCCL find out themselves, and by an operation that
is not through after the group's ``timeout``; the process goes on.

The ``timeout`` is also for joining, for ``barrier``, and for ``destroy_process_group``, which waits for what was
started. Reductions are SUM, PRODUCT, MAX, MIN, AVG and PREMUL_SUM. An operation that cannot be right on this rank
raises before anything is sent.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from monarch_slurm.actor.context import current_context
from monarch_slurm.actor.runtime import Runtime
from monarch_slurm.collectives.ccl import CclTransport
from monarch_slurm.collectives.errors import CollectiveError, PeerLostError
from monarch_slurm.collectives.peers import Membership, enroll
from monarch_slurm.collectives.rendezvous import invite
from monarch_slurm.gpu.libraries import gpu_runtime_files
from monarch_slurm.native_build import load_native
from monarch_slurm.wire import Address

BACKEND = "monarch"
_streams: list[torch.cuda.Stream] = []  # as long-lived as the process: a group's last operations may still run
_groups: list[tuple[CclTransport, Membership]] = []
_lock = threading.Lock()


class Group(NamedTuple):
    """One rank's end of a process group."""

    backend: Any
    """A ``torch._C._distributed_c10d.Backend``."""
    transport: CclTransport
    stream: torch.cuda.Stream
    """Where its operations run."""


def join_group(
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    runtime: Runtime | None,
    device_type: str = "cuda",
    join_timeout: timedelta | None = None,
) -> Group:
    """Meet the other ranks at ``store`` and make a group on the current GPU; blocks until all are there.

    Args:
        store: a torch ``Store`` that no other group uses.
        rank: this process's place, from 0.
        size: number of ranks.
        timeout: how long an operation may take; then the group is aborted.
        runtime: the actor runtime of this process, which hears of deaths; None: nobody tells.
        device_type: torch's name of it; there is a device module of that name that is like ``torch.cuda``.
        join_timeout: how long to wait for the others; None: ``timeout``.

    Raises:
        PeerLostError: a rank's process ended meanwhile.
        CollectiveError: a rank did not come.
    """
    if rank == 0:
        store.set("unique_id", invite("ccl")[0].token)
    token = bytes(store.get("unique_id"))
    native = load_native("_c10d")  # before the others are met: the first time it is compiled
    processes = _processes(store, rank, size, runtime)
    devices: Any = torch.get_device_module(device_type)
    device = torch.device(device_type, devices.current_device())
    fate = _Fate()
    membership = enroll(runtime, processes, fate.lost)
    try:
        transport = CclTransport.join(token, rank, size, device, (join_timeout or timeout).total_seconds(), fate.news)
        fate.decides_over(transport)
    except CollectiveError:
        membership.end()
        if fate.error is not None:
            raise fate.error from None
        raise
    stream = devices.Stream(device, priority=-1)
    with _lock:
        _tidy()
        _groups.append((transport, membership))
        _streams.append(stream)
    comm = transport.comm.capsule()
    seconds = timeout.total_seconds()
    backend = native.create(rank, size, comm, stream, stream.cuda_stream, seconds, gpu_runtime_files())
    transport.overdue = lambda: str(native.overdue(backend))
    return Group(backend, transport, stream)


def register() -> None:
    """Make torch.distributed know the backend; importing this module has done it. Again does nothing."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, devices=["cuda"])


def use_for_gpus() -> None:
    """Have torch take this backend for GPUs wherever a program names none, or asks torch which one to take.

    ``init_process_group()``, ``init_device_mesh("cuda", ...)`` and programs like TorchTitan run on it then, unchanged.
    """
    dist.Backend.default_device_backend_map["cuda"] = BACKEND


def current_runtime() -> Runtime | None:
    """Return the actor runtime to give to `join_group`: of the endpoint that runs; None outside of any."""
    here = current_context()
    return here.actor_instance.runtime if here is not None else None


class _Fate:
    """What becomes of a group: news of a lost rank ends the join, and later the group."""

    def __init__(self) -> None:
        self.news = threading.Event()
        self.error: PeerLostError | None = None
        self._lock = threading.Lock()
        self._transport: CclTransport | None = None

    def lost(self, reason: str, rank: int) -> None:
        with self._lock:
            if self.error is None:
                self.error = PeerLostError(reason, rank)
            self.news.set()
            transport = self._transport
        if transport is not None:
            transport.abort(self.error)

    def decides_over(self, transport: CclTransport) -> None:
        with self._lock:
            self._transport = transport
            error = self.error
        if error is not None:
            transport.abort(error)
            raise error


def _create(store: Any, rank: int, size: int, timeout: timedelta, device_type: str = "cuda") -> Any:
    return join_group(store, rank, size, timeout, current_runtime(), device_type).backend


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


register()
