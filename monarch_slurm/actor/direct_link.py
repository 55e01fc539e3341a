"""One end of a direct link, and what it needs of the process's connections; `direct` says what they are for."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from typing import Protocol

from monarch_slurm.wire import AGENT, Address, Message
from monarch_slurm.wire.stream_peer import Ears


class Ordering(Protocol):
    """What is used of an `Order`."""

    def hand_over(self, call: Callable[[], None]) -> None:
        """Have a call made on the loop's thread. On the thread that reads."""

    def hand_on(
        self,
        name: str,
        message: Message,
        on_quick: Callable[[str, Message], bool],
        on_message: Callable[[str, Message], None],
    ) -> None:
        """Have a message taken. On the thread that reads."""


class Connections(Protocol):
    """What is used of a `StreamLink`."""

    @property
    def order(self) -> Ordering:
        """How what has come is left to the loop's thread."""

    def adopt(self, connection: socket.socket, name: str, ears: Ears) -> None:
        """Have one more connection."""

    def send(self, message: Message, peer: str) -> None:
        """Send, or raise `UnknownPeerError`."""

    def between(self, call: Callable[[], None]) -> None:
        """Have a call made on the thread that reads."""

    def read_all(self, peer: str) -> None:
        """Read what has come. On the thread that reads."""

    def forget(self, peer: str) -> None:
        """Close a connection. On the thread that reads."""


class DirectLink:
    """One end of a link with the process ``address``, which the process's connections know as ``name``."""

    def __init__(self, address: Address, name: str, incarnation: int) -> None:
        self.address = address
        self.name = name
        self.incarnation = incarnation
        """That of the process at the other end."""
        # With the lock of `DirectLinks`:
        self.agreed = False
        """The other end has it, too."""
        self.sending = False
        self.routed = 0
        # On the thread that reads:
        self.reading = False
        self.waiting: deque[Message] = deque()
        """What has come before its ``direct_on``."""
        self.gone = False
        """Nothing comes any more."""
        # On the loop's thread; others may look:
        self.open = False
        """Its sender uses it, so that what the agent brings of that sender comes later."""
        self.held: deque[Message] = deque()
        """What the agent has brought meanwhile."""


def kill_message(proc: Address, sender: Address) -> Message:
    """Return the message that has the agent of ``proc`` kill it."""
    mesh, _, rank = proc.proc.rpartition(".")
    return Message("kill", Address(proc.host, AGENT), sender, {"mesh": mesh, "ranks": [int(rank)], "signal": 9})
