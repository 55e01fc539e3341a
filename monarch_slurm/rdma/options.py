"""The settings of transfers: those of `monarch_slurm.config` where it knows them, else environment variables of the
same name.

``MONARCH_SLURM_RDMA_TRANSPORTS=tcp`` in the environment, for instance, leaves only TCP.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from monarch_slurm.config import settings
from monarch_slurm.errors import ConfigError

_ENV_PREFIX = "MONARCH_SLURM_"

TRANSPORTS = ("local", "shm", "process_vm", "ibverbs", "tcp")
"""Every way of transfer, best first."""


@dataclass(frozen=True)
class Options:
    """Settings of the transfers of this process."""

    rdma_transports: str = ",".join(TRANSPORTS)
    """Comma-separated ways of transfer that may be used; their order is fixed: best first."""
    rdma_allow_tcp_fallback: bool = True
    """Use TCP where two hosts have no RDMA device in common."""
    rdma_disable_ibverbs: bool = False
    """Leave RDMA devices alone."""
    rdma_ibverbs_target: str = ""
    """``nic:<name>`` or ``nic:<name>:<port>`` takes this device; empty takes the best one."""
    rdma_max_chunk_size_mb: int = 4
    """Megabytes (2**20 bytes) of one chunk; a transfer is cut into chunks."""
    rdma_tcp_streams: int = 4
    """TCP connections to one peer."""
    rdma_tcp_threads: int = 2
    """Threads that serve peers' TCP connections."""
    rdma_qps_per_peer: int = 4
    """Queue pairs to one peer."""
    rdma_registration_cache_mb: int = 16384
    """Megabytes of local memory that stay registered with a device after a transfer."""

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
    found: dict[str, Any] = {}
    for field in dataclasses.fields(Options):
        text = os.environ.get(_ENV_PREFIX + field.name.upper())
        if hasattr(known, field.name):
            found[field.name] = getattr(known, field.name)
        elif text is not None:
            found[field.name] = _parse(field.name, text, type(field.default))
    return Options(**found)


def _parse(name: str, text: str, kind: type) -> Any:
    try:
        return text.lower() in ("1", "true", "yes", "on") if kind is bool else kind(text)
    except ValueError:
        raise ConfigError(f"{_ENV_PREFIX}{name.upper()}={text!r}: {kind.__name__} expected") from None
