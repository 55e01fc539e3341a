"""The settings of transfers, as the rest of this folder wants them. They are set in `monarch_slurm.config`.

``MONARCH_SLURM_RDMA_TRANSPORTS=tcp`` in the environment, for instance, leaves only TCP.
"""

from __future__ import annotations

from monarch_slurm.config import settings
from monarch_slurm.errors import ConfigError

TRANSPORTS = ("local", "shm", "process_vm", "gpu_ipc", "ibverbs", "tcp")
"""Every way of transfer, best first."""


def transports() -> frozenset[str]:
    """Return the ways of transfer that may be used.

    Raises:
        ConfigError: ``rdma_transports`` names one that does not exist.
    """
    current = settings()
    names = frozenset(name.strip() for name in current.rdma_transports.split(",") if name.strip())
    unknown = names - set(TRANSPORTS)
    if unknown:
        raise ConfigError(f"unknown RDMA transport {sorted(unknown)}; there are: {', '.join(TRANSPORTS)}")
    if current.rdma_disable_ibverbs:
        names -= {"ibverbs"}
    if not current.rdma_allow_tcp_fallback:
        names -= {"tcp"}
    return names


def chunk_bytes() -> int:
    """Return the bytes of one chunk."""
    return settings().rdma_max_chunk_size_mb * 2**20
