"""The actor that holds the communicators of one proc. Imported only by `mesh`, when a mesh of procs is handed in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

from monarch_slurm.actor import Actor, concurrent_endpoint, context
from monarch_slurm.collectives.communicator import Communicator
from monarch_slurm.collectives.errors import CollectiveError, PeerLostError
from monarch_slurm.collectives.mesh import register
from monarch_slurm.collectives.peers import Membership, enroll, lose
from monarch_slurm.collectives.rendezvous import CommunicatorKeys, Invitation, invite
from monarch_slurm.host.identity import ADDRESS_VARIABLE
from monarch_slurm.wire import Address
from monarch_slurm.wire.task_limits import start_thread

T = TypeVar("T")


class Keeper(Actor):
    """Joins, aborts and closes a proc's communicators. Its endpoints overlap: an abort must pass a join that waits."""

    def __init__(self) -> None:
        self._communicators: dict[str, Communicator] = {}
        self._keys: dict[str, CommunicatorKeys] = {}
        self._members: dict[str, Membership] = {}

    @concurrent_endpoint
    async def host(self) -> tuple[str, str, Address]:
        """Return the name and address of this host, and the control plane's address of this process."""
        process = context().actor_instance.runtime.address
        # Not what the machine's own name stands for: that is often another network, or loopback.
        return socket.gethostname(), os.environ.get(ADDRESS_VARIABLE, "127.0.0.1"), process

    @concurrent_endpoint
    async def invite(self, name: str, backend: str, address: str) -> Invitation:
        """Make an invitation. The keys of the communicator that had that name are deleted."""
        # On this thread: the store is spawned by this actor, which owns it.
        invitation, keys = invite(backend, address)
        before = self._keys.pop(name, None)
        if before is not None:
            before.close()
        if keys is not None:
            self._keys[name] = keys
        return invitation

    @concurrent_endpoint
    async def join(
        self, name: str, invitation: Invitation, rank: int, processes: list[Address], timeout_s: float
    ) -> None:
        """Join, in a thread of its own; ``processes`` has the process of each rank. What had that name is aborted.

        Raises:
            PeerLostError: one of them ended meanwhile.
        """
        lost: Future[None] = Future()

        def abort(reason: str, lost_rank: int) -> None:
            with contextlib.suppress(InvalidStateError):  # the first news counts
                lost.set_exception(PeerLostError(reason, lost_rank))

        if name in self._communicators:
            self._communicators.pop(name).abort("it is made anew")
        if name in self._members:
            self._members.pop(name).end()
        self._members[name] = enroll(context().actor_instance.runtime, processes, abort)
        joining = _on_thread(lambda: Communicator.join(invitation, rank, len(processes), timeout_s=timeout_s))
        await _first_done(joining, lost)
        if not joining.done():
            # The library cannot be called back; what it makes in the end is of no use to anybody.
            joining.add_done_callback(_abandon)
            lost.result()
        made = joining.result()
        lost.add_done_callback(lambda news: made.abort(*_blame(news)))
        self._communicators[name] = made
        register(name, made)

    @concurrent_endpoint
    async def abort(self, name: str, reason: str, rank: int | None) -> None:
        """Abort the communicator of that name, if there is one, and all that have the lost process as a peer."""
        # Nothing is awaited: a join that was asked for later must not have made new ones meanwhile.
        if name in self._communicators:
            self._communicators[name].abort(reason, rank)
        if name in self._members and rank is not None:
            lose(self._members[name].processes[rank], reason)

    @concurrent_endpoint
    async def close(self, name: str) -> None:
        """Close the communicator of that name, if there is one. News of a lost peer, and `abort`, end the wait."""
        register(name, None)
        made, member, keys = self._communicators.get(name), self._members.get(name), self._keys.get(name)
        try:
            if made is not None:
                await asyncio.to_thread(made.close)
        except (CollectiveError, TimeoutError):
            if made is not None:
                made.abort("it could not be closed")
            raise
        finally:
            if member is not None:
                member.end()
            if keys is not None:
                keys.close()
            for held, mine in ((self._communicators, made), (self._members, member), (self._keys, keys)):
                if held.get(name) is mine:  # else a join has put new ones there
                    held.pop(name, None)


def _on_thread(function: Callable[[], T]) -> Future[T]:
    """Run a function on a thread that the end of the process does not wait for."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # whoever waits gets it
            outcome.set_exception(error)

    start_thread(threading.Thread(target=run, name="communicator-join", daemon=True))
    return outcome


async def _first_done(*futures: Future[Any]) -> None:
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: Future[Any]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(done.set)

    for future in futures:
        future.add_done_callback(wake)
    await done.wait()


def _abandon(joined: Future[Communicator]) -> None:
    if joined.exception() is None:
        joined.result().abort("nobody waits for it any more")


def _blame(news: Future[None]) -> tuple[str, int | None]:
    error = news.exception()
    assert isinstance(error, PeerLostError)
    return error.reason, error.rank
