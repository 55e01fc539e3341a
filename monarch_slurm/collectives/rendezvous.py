"""How the ranks of a communicator find each other: one makes an invitation, the control plane carries it."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from monarch_slurm.collectives.errors import CollectiveError
from monarch_slurm.wire.ports import listen_tcp


@dataclass(frozen=True)
class Invitation:
    """What the ranks of a new communicator have in common. Whoever has it can join: send it over the control plane.

    Args:
        backend: ``ccl`` (RCCL or NCCL) or ``gloo``.
        token: NCCL's unique id; for gloo ``host:port`` of the store that the inviting rank serves.
    """

    backend: str
    token: bytes = field(repr=False)


def invite(backend: str, address: str = "127.0.0.1") -> tuple[Invitation, Any]:
    """Make an invitation on one rank.

    Args:
        backend: ``ccl`` or ``gloo``.
        address: how the other ranks reach this host; gloo's store is served there. NCCL finds its own.

    Returns:
        The invitation, and something to keep until every rank has joined and for as long as the communicator is split.

    Raises:
        MonarchSlurmError: RCCL or NCCL is not there.
        CollectiveError: ``address`` is none of this host's.
    """
    if backend == "ccl":
        from monarch_slurm.gpu.libraries import ccl_library

        return Invitation("ccl", ccl_library().unique_id()), None
    if backend != "gloo":
        raise ValueError(f"backend {backend!r}: ccl or gloo expected")
    from torch._C._distributed_c10d import TCPStore

    try:
        server = listen_tcp(address, 1024)  # left to itself the store would listen on every interface
    except OSError as error:
        raise CollectiveError(f"cannot serve at {address}: {error}; give an address of this host") from error
    store = TCPStore(
        address,
        server.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=server.detach(),
    )
    return Invitation("gloo", f"{address}:{store.port}".encode()), store


def own_address(peer: str) -> str:
    """Return the address of this host on the way to ``peer``; nothing is sent."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])
