"""Where a connection comes from: its address, and the user at its other end where this kernel knows that.

For Unix sockets the kernel names the user (SO_PEERCRED of unix(7)). For TCP it does so if the other end is a socket of
this machine, too: ``ss -e`` shows it. One question about one connection (sock_diag(7)) costs microseconds, however many
connections there are; where that interface is missing, ``/proc/net/tcp`` (proc(5)) is read.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from dataclasses import dataclass

_CREDENTIALS = struct.Struct("3i")

# sock_diag(7), linux/inet_diag.h: struct nlmsghdr, then inet_diag_req_v2 or inet_diag_msg.
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI")
_NO_COOKIE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
_STATE, _UID = _HEADER.size + 1, _HEADER.size + 4 + 48 + 12
_ESTABLISHED = 1
_ANSWER_SECONDS = 1.0

_MANY_ADDRESSES = 64
"""Bits of an IPv6 address that tell networks apart: one machine may use all addresses of its network."""


@dataclass(frozen=True)
class Origin:
    """Where a connection comes from.

    Attributes:
        address: IP address of the other end; empty at a Unix socket.
        uid: user at the other end; None if it is on another machine, in another network namespace, or already closed.
        pid: process at the other end of a Unix socket; 0 if it is not known.
    """

    address: str
    uid: int | None = None
    pid: int = 0

    @property
    def is_own(self) -> bool:
        """Whether the other end belongs to the user of this process."""
        return self.uid == os.getuid()

    @property
    def group(self) -> str:
        """What one user, or one machine, can have many connections from: those of one group are counted together."""
        if self.uid is not None:
            return f"uid {self.uid}"
        if ":" in self.address:
            network = ipaddress.IPv6Network((self.address.partition("%")[0], _MANY_ADDRESSES), strict=False)
            return str(network)
        return self.address

    def __str__(self) -> str:
        who = "" if self.uid is None else f"uid {self.uid}"
        if self.address and who:
            return f"{self.address} ({who})"
        return self.address or who or "an address that could not be read any more"


def origin_of(connection: socket.socket) -> Origin:
    """Return where a connected TCP or Unix stream socket comes from.

    Raises:
        OSError: it is not connected any more.
    """
    if connection.family == socket.AF_UNIX:
        pid, uid, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        return Origin("", uid, pid)
    here, there = connection.getsockname()[:2], connection.getpeername()[:2]
    address = _plain(there[0])
    local = address == _plain(here[0]) or ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return Origin(address, uid_of_tcp(there, here) if local else None)


def uid_of_tcp(near: tuple[str, int], far: tuple[str, int]) -> int | None:
    """Return the user whose socket of this machine is at ``near`` and connected with ``far``; None if none is."""
    near, far = (_plain(near[0]), near[1]), (_plain(far[0]), far[1])
    try:
        return _ask_kernel(near, far)
    except OSError:
        return _look_up(near, far)


def _ask_kernel(near: tuple[str, int], far: tuple[str, int]) -> int | None:
    families = [socket.AF_INET6] if ":" in near[0] else [socket.AF_INET, socket.AF_INET6]
    # A socket of IPv6 may speak IPv4, under its mapped address.
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_ANSWER_SECONDS)
        for family in families:
            ends = struct.pack(">HH", near[1], far[1]) + _packed(near[0], family) + _packed(far[0], family)
            request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + ends + _NO_COOKIE
            kernel.send(_HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0) + request)
            answer = kernel.recv(4096)
            if len(answer) >= _UID + 4 and _HEADER.unpack_from(answer)[1] == _SOCK_DIAG_BY_FAMILY:
                # The socket of a process that has closed it belongs to nobody, and reads as root's.
                return int(struct.unpack_from("=I", answer, _UID)[0]) if answer[_STATE] == _ESTABLISHED else None
            if len(answer) >= _HEADER.size + 4:
                error = -struct.unpack_from("=i", answer, _HEADER.size)[0]
                if error != 2:  # ENOENT: there is no such connection
                    raise OSError(error, os.strerror(error))
    return None


def _look_up(near: tuple[str, int], far: tuple[str, int]) -> int | None:
    for path, family in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        if family == socket.AF_INET and ":" in near[0]:
            continue
        wanted = [f"{_as_in_proc(end[0], family)}:{end[1]:04X}" for end in (near, far)]
        try:
            with open(path) as table:
                for line in table:
                    row = line.split()
                    if row[1:3] == wanted and row[3] == f"{_ESTABLISHED:02X}":
                        return int(row[7])
        except OSError:
            continue
    return None


def _packed(address: str, family: int) -> bytes:
    """Return an address in the 16 bytes of ``struct inet_diag_sockid``."""
    plain = ipaddress.ip_address(address.partition("%")[0])
    if family == socket.AF_INET:
        return plain.packed + bytes(12)
    return plain.packed if plain.version == 6 else bytes(10) + b"\xff\xff" + plain.packed


def _as_in_proc(address: str, family: int) -> str:
    packed = _packed(address, family)[: 4 if family == socket.AF_INET else 16]
    words = [int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4)]
    return "".join(f"{word:08X}" for word in words)


def _plain(address: str) -> str:
    """Return an IPv4 address that came mapped into IPv6 as such."""
    mapped = ipaddress.IPv6Address(address.partition("%")[0]).ipv4_mapped if ":" in address else None
    return address if mapped is None else str(mapped)
