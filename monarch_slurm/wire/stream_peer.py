"""One end of a Unix stream as a `StreamLink` knows it, and how it says its name."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from monarch_slurm.wire.bulk import in_place
from monarch_slurm.wire.frames import Message, WireError
from monarch_slurm.wire.large_buffers import Buffer
from monarch_slurm.wire.stream import Stream

_GREETING = b"monarch_slurm 1 "


@dataclass(frozen=True)
class Ears:
    """What is told of a connection that is apart from the others of its link, on whatever thread reads.

    Attributes:
        on_message: gets each message, in order.
        on_closed: the peer has closed its connection, or has ended.
        on_fault: what came is no message; the connection is closed.
    """

    on_message: Callable[[Message], None]
    on_closed: Callable[[], None]
    on_fault: Callable[[WireError], None]


class Peer:
    """A connection, its name (None until the peer has said it) and the numbers of its messages.

    Args:
        ears: of a connection that is apart.
    """

    def __init__(self, connection: socket.socket, name: str | None, ears: Ears | None = None) -> None:
        self.stream = Stream(connection)
        self.name = name
        self.ears = ears
        if ears is not None:
            _apart.add(connection)
        self.sent = 0
        self.received = 0
        self.to_flush = False
        self.blocked = False
        """Whether the epoll tells when there is room."""


_apart: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_apart() -> None:
    """In a forked child, which would keep the other end from noticing that this process has ended."""
    for connection in list(_apart):
        connection.close()


os.register_at_fork(after_in_child=_close_apart)


def greeting(name: str) -> list[Buffer]:
    """Return the first packet of the process ``name``."""
    return [_GREETING + name.encode()]


def name_in(frames: Sequence[Buffer]) -> str:
    """Return the name in the first packet of a connection.

    Raises:
        WireError: the packet is something else.
    """
    first = bytes(in_place(frames[0]))
    if len(frames) != 1 or not first.startswith(_GREETING):
        raise WireError("no greeting of this package, or of another version of it")
    return first.removeprefix(_GREETING).decode(errors="replace")
