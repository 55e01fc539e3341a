"""The debugger for programs: which ranks are stopped, asked of one actor."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass, field
from typing import Any

from monarch_slurm.actor.actor import Actor
from monarch_slurm.actor.client import client
from monarch_slurm.actor.controllers import get_or_spawn_controller
from monarch_slurm.actor.debugger.own import DebuggerWrite, OwnSession
from monarch_slurm.actor.endpoint import concurrent_endpoint, endpoint


@dataclass(frozen=True)
class DebugSessionInfo:
    """A rank that is stopped, and where."""

    actor_name: str
    rank: int
    coords: dict[str, int] = field(hash=False)
    hostname: str
    function: str
    lineno: int


class DebugController(Actor):
    """Knows the stopped ranks of the program. It runs in the program's own process."""

    _is_system_actor = True

    def __init__(self) -> None:
        self._own: dict[tuple[str, int], OwnSession] = {}

    @endpoint
    async def list(self, print_output: bool = True) -> list[DebugSessionInfo]:
        """Return the stopped ranks, and print them."""
        sessions = [
            DebugSessionInfo(rank.actor, rank.rank, rank.coords, rank.host, rank.function, rank.line)
            for rank in client().desk.stopped()
        ]
        if print_output:
            for session in sessions:
                print(f"{session.actor_name} {session.rank} {session.hostname} {session.function}:{session.lineno}")
        return sessions

    @concurrent_endpoint
    async def wait_pending_session(self) -> None:
        """Return once a rank is stopped."""
        desk = client().desk

        def wait() -> None:
            with desk.changed:
                desk.changed.wait_for(desk.stopped)

        await asyncio.to_thread(wait)

    @concurrent_endpoint
    async def debugger_session_start(self, rank: int, coords: dict[str, int], hostname: str, actor_name: str) -> None:
        """List a debugger of the caller's own, which says what it wants to with the endpoints below."""
        if (actor_name, rank) not in self._own:
            self._own[actor_name, rank] = OwnSession(client().desk, actor_name, rank, coords, hostname)

    @concurrent_endpoint
    async def debugger_session_end(self, actor_name: str, rank: int) -> None:
        """Take it off the list."""
        self._session(actor_name, rank).end()
        del self._own[actor_name, rank]

    @concurrent_endpoint
    async def debugger_read(self, actor_name: str, rank: int, size: int) -> DebuggerWrite | str:
        """Return up to ``size`` bytes of what a person types for it, as soon as there are some.

        Once the session has ended it is the text ``"detach"``.
        """
        return await self._session(actor_name, rank).read(size)

    @concurrent_endpoint
    async def debugger_write(self, actor_name: str, rank: int, write: DebuggerWrite) -> None:
        """Show to a person what it says."""
        self._session(actor_name, rank).write(write)

    def _session(self, actor_name: str, rank: int) -> OwnSession:
        try:
            return self._own[actor_name, rank]
        except KeyError:
            raise ValueError(f"no debugger of {actor_name} {rank} has been started") from None


@functools.cache
def debug_controller() -> Any:
    """Return the actor that knows the stopped ranks of this program."""
    return get_or_spawn_controller("debug_controller", DebugController).get()
