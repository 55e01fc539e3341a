"""The actor that holds the communicators of one proc. Imported only by `mesh`, when a mesh of procs is handed in."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from monarch_slurm.actor import Actor, concurrent_endpoint
from monarch_slurm.collectives.communicator import Communicator
from monarch_slurm.collectives.mesh import register
from monarch_slurm.collectives.rendezvous import Invitation, invite


class Keeper(Actor):
    """Joins, aborts and closes a proc's communicators. Its endpoints overlap: an abort must pass a join that waits."""

    def __init__(self) -> None:
        self._communicators: dict[str, Communicator] = {}
        self._kept: dict[str, Any] = {}

    @concurrent_endpoint
    async def host(self) -> tuple[str, str]:
        """Return the name and address of this host."""
        name = socket.gethostname()
        try:
            return name, socket.gethostbyname(name)
        except OSError:
            return name, "127.0.0.1"

    @concurrent_endpoint
    async def invite(self, name: str, backend: str, address: str) -> Invitation:
        """Make an invitation and keep what serves it."""
        invitation, self._kept[name] = await asyncio.to_thread(invite, backend, address)
        return invitation

    @concurrent_endpoint
    async def join(self, name: str, invitation: Invitation, rank: int, size: int, timeout_s: float) -> None:
        """Join, in a thread of its own."""
        made = await asyncio.to_thread(Communicator.join, invitation, rank, size, timeout_s=timeout_s)
        self._communicators[name] = made
        register(name, made)

    @concurrent_endpoint
    async def abort(self, name: str, reason: str, rank: int | None) -> None:
        """Abort the communicator of that name, if there is one."""
        if name in self._communicators:
            await asyncio.to_thread(self._communicators[name].abort, reason, rank)

    @concurrent_endpoint
    async def close(self, name: str) -> None:
        """Close the communicator of that name, if there is one."""
        register(name, None)
        if name in self._communicators:
            await asyncio.to_thread(self._communicators.pop(name).close)
        self._kept.pop(name, None)
