"""The settings of transfers (``rdma_*`` of `monarch_slurm.config`).

``MONARCH_SLURM_RDMA_TRANSPORTS=tcp`` in the environment, for instance, leaves only TCP.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from monarch_slurm.config import settings
from monarch_slurm.errors import ConfigError

TRANSPORTS = ("local", "shm", "process_vm", "ibverbs", "tcp")
"""Every way of transfer, best first."""


@dataclass(frozen=True)
class Options:
    """Settings of the transfers of this process; `monarch_slurm.config` says what each is."""

    rdma_transports: str
    rdma_allow_tcp_fallback: bool
    rdma_disable_ibverbs: bool
    rdma_ibverbs_target: str
    rdma_max_chunk_size_mb: int
    rdma_tcp_streams: int
    rdma_tcp_threads: int
    rdma_qps_per_peer: int
    rdma_registration_cache_mb: int

    @property
    def transports(self) -> frozenset[str]:
        """The ways of transfer that may be used."""
        names = frozenset(name.strip() for name in self.rdma_transports.split(",") if name.strip())
        unknown = names - set(TRANSPORTS)
        if unknown:
            raise ConfigError(f"unknown RDMA transport {sorted(unknown)}; there are: {', '.join(TRANSPORTS)}")
        if self.rdma_disable_ibverbs:
            names -= {"ibverbs"}
        if not self.rdma_allow_tcp_fallback:
            names -= {"tcp"}
        return names

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk."""
        return max(1, self.rdma_max_chunk_size_mb) * 2**20


def options() -> Options:
    """Return the settings in force now.

    Raises:
        ConfigError: an environment variable has a value that cannot be used.
    """
    known = settings()
    return Options(**{field.name: getattr(known, field.name) for field in dataclasses.fields(Options)})
