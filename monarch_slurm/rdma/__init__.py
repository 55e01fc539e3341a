"""Bulk data between processes of a job: buffers that any member can read and write while their owner does nothing.

Source-compatible with Monarch's ``monarch.rdma``. The map of this folder:

- `buffer`: `RDMABuffer` and `RDMAAction`, what users hold
- `manager`: one per process: what peers may reach here; `peer`: the best engine to each peer; `control`: questions to
others
- `registry`, `memory`: what can be reached, and where it lies; `slot_locks`: what drops wait for
- `local`, `samehost`, `verbs`, `tcp_client`, `tcp_server`: the engines, best first
- `registration`: local memory that stays registered; `lanes`: connections lent to batches
- `choice`, `options`: which may be used; `records`: which were used

The engines know nothing of actors; only `buffer`, `manager`, `peer` and `control` do.
"""

from monarch_slurm.rdma.buffer import RDMAAction, RDMABuffer
from monarch_slurm.rdma.choice import (
    RDMAReadTransferWarning,
    RDMATcpFallbackWarning,
    RDMAWriteTransferWarning,
    get_rdma_backend,
    is_ibverbs_available,
    is_rdma_available,
)
from monarch_slurm.rdma.errors import (
    BufferGoneError,
    DeviceError,
    NoBackendError,
    PeerLostError,
    RDMAError,
    RDMATimeoutError,
    RegistrationError,
)
from monarch_slurm.rdma.records import TransferCount, TransferRecord, recent_transfers, transfer_counts
from monarch_slurm.rdma.samehost import shared_memory

__all__ = [
    "BufferGoneError",
    "DeviceError",
    "NoBackendError",
    "PeerLostError",
    "RDMAAction",
    "RDMABuffer",
    "RDMAError",
    "RDMAReadTransferWarning",
    "RDMATcpFallbackWarning",
    "RDMATimeoutError",
    "RDMAWriteTransferWarning",
    "RegistrationError",
    "TransferCount",
    "TransferRecord",
    "get_rdma_backend",
    "is_ibverbs_available",
    "is_rdma_available",
    "recent_transfers",
    "shared_memory",
    "transfer_counts",
]
