"""One end of a Unix stream as a `StreamLink` knows it, and how it says its name."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from monarch_slurm.wire.bulk import in_place
from monarch_slurm.wire.frames import WireError
from monarch_slurm.wire.pickling import Buffer
from monarch_slurm.wire.stream import Stream

_GREETING = b"monarch_slurm 1 "


class Peer:
    """A connection, its name (None until the peer has said it) and the numbers of its messages."""

    def __init__(self, connection: socket.socket, name: str | None) -> None:
        self.stream = Stream(connection)
        self.name = name
        self.sent = 0
        self.received = 0
        self.to_flush = False
        self.blocked = False
        """Whether the epoll tells when there is room."""


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
