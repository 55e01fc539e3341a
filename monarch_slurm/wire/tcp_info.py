"""What this machine's kernel knows of the machine at the other end of a TCP connection (TCP_INFO of tcp(7)).

A kernel acknowledges what arrives for a process that is busy, stopped (SIGSTOP) or swapped out, and closes the
connections of one that has ended. Nothing answers for a machine that is cut off or has no power. So acknowledgements
tell a machine that is gone from a process that is only slow.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# struct tcp_info of linux/tcp.h: state, probes; unacked; last_ack_recv; notsent_bytes (Linux 4.6).
_STATE, _PROBES = 0, 3
_UNACKED, _LAST_ACK, _NOT_SENT = 8 + 4 * 4, 8 + 12 * 4, 144
_INFO_BYTES = _NOT_SENT + 4
_ESTABLISHED = 1


@dataclass(frozen=True)
class TcpConnection:
    """A connection of this process that others own and may close at any time.

    Attributes:
        fd: its descriptor.
        ends: addresses of both ends, which tell it from a later connection with the same descriptor.
    """

    fd: int
    ends: tuple[Any, Any]

    @staticmethod
    def of(fd: int) -> TcpConnection | None:
        """Return the connection with the descriptor ``fd``; None if it is no TCP connection."""
        with contextlib.suppress(OSError, ValueError), _borrowed(fd) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                return TcpConnection(fd, _ends(connection))
        return None

    def machine_silence(self) -> float | None:
        """Return the seconds since the other machine answered; None if the connection is gone. See `silence_in`."""
        with contextlib.suppress(OSError), _borrowed(self.fd) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            if connection.family in (socket.AF_INET, socket.AF_INET6) and _ends(connection) == self.ends:
                return silence_in(info)
        return None


def silence_in(info: bytes) -> float | None:
    """Return the seconds since the last acknowledgement, as ``info`` (a ``struct tcp_info``) tells; None if the
    connection has ended.

    Whoever asks sends something to the other end now and then, or there is nothing to acknowledge. A receiver that has
    no room (its process reads nothing) is asked for room less and less often; it is not silent until a question is left
    without an answer.
    """
    if len(info) < _INFO_BYTES or info[_STATE] != _ESTABLISHED:
        return None
    unacked, last_ack, not_sent = (struct.unpack_from("I", info, at)[0] for at in (_UNACKED, _LAST_ACK, _NOT_SENT))
    if not_sent and not unacked and not info[_PROBES]:
        return 0.0
    return float(last_ack) / 1000


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    connection = socket.socket(fileno=fd)
    try:
        yield connection
    finally:
        connection.detach()


def _ends(connection: socket.socket) -> tuple[Any, Any]:
    return connection.getsockname(), connection.getpeername()
