"""Which way of transfer between hosts this process has."""

from __future__ import annotations

import warnings

from monarch_slurm.config import settings
from monarch_slurm.rdma.options import transports
from monarch_slurm.rdma.verbs import verbs_host


class RDMAReadTransferWarning(UserWarning):
    """A read goes a slower way than it could."""


class RDMAWriteTransferWarning(UserWarning):
    """A write goes a slower way than it could."""


class RDMATcpFallbackWarning(UserWarning):
    """Buffers travel between hosts over TCP, since no RDMA device is used."""


def is_ibverbs_available() -> bool:
    """Return whether this process has an RDMA device with an active port, and may use it."""
    return "ibverbs" in transports() and verbs_host() is not None


def is_rdma_available() -> bool:
    """Return `is_ibverbs_available`; the older name."""
    warnings.warn("is_rdma_available is deprecated: use is_ibverbs_available", DeprecationWarning, stacklevel=2)
    return is_ibverbs_available()


def get_rdma_backend() -> str:
    """Return what carries buffers between hosts: ``"ibverbs"``, ``"tcp"``, or ``"none"`` if nothing is allowed."""
    if is_ibverbs_available():
        return "ibverbs"
    return "tcp" if settings().rdma_allow_tcp_fallback else "none"
