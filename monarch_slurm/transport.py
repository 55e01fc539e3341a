"""Names of transports, as Monarch's programs use them. Here a transport is not chosen: procs of a host talk over Unix
sockets, hosts over TCP with CURVE. What a name can still say is the address that the client listens at.
"""

from __future__ import annotations

import enum
import os
import re
import secrets
import socket
from dataclasses import dataclass


class ChannelTransport(enum.Enum):
    """Kinds of transports that Monarch knows."""

    TcpWithLocalhost = "tcp(localhost)"
    TcpWithHostname = "tcp(hostname)"
    MetaTlsWithHostname = "metatls(hostname)"
    MetaTlsWithIpV6 = "metatls(ipv6)"
    Tls = "tls"
    Local = "local"
    Unix = "unix"

    def __str__(self) -> str:
        return self.value


_SHORT = {
    "tcp": ChannelTransport.TcpWithHostname,
    "ipc": ChannelTransport.Unix,
    "metatls": ChannelTransport.MetaTlsWithIpV6,
    "metatls-hostname": ChannelTransport.MetaTlsWithHostname,
    **{transport.value: transport for transport in ChannelTransport},
}
_ADDRESS = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")


@dataclass(frozen=True, init=False)
class BindSpec:
    """Where the client listens: a kind of transport, or ``tcp://host:port``.

    Args:
        spec: the transport, or a text for `of`.
        address: ``tcp://host:port``; only with a transport.

    Raises:
        ValueError: ``spec`` is a text that is neither.
        TypeError: it is something else.
    """

    transport: ChannelTransport
    address: str

    def __init__(self, spec: ChannelTransport | str, address: str = "") -> None:
        if not isinstance(spec, ChannelTransport):
            parsed = BindSpec.of(spec)
            spec, address = parsed.transport, parsed.address
        object.__setattr__(self, "transport", spec)
        object.__setattr__(self, "address", address)

    @staticmethod
    def of(value: object) -> BindSpec:
        """Return what ``value`` means: a `BindSpec`, a `ChannelTransport` or a text.

        Raises:
            ValueError: the text is neither a transport nor an address.
            TypeError: it is something else.
        """
        if isinstance(value, BindSpec):
            return value
        if isinstance(value, ChannelTransport):
            return BindSpec(value)
        if not isinstance(value, str):
            raise TypeError(f"a ChannelTransport or a str expected, not {type(value).__name__}")
        if value in _SHORT:
            return BindSpec(_SHORT[value])
        match = _ADDRESS.fullmatch(value)
        if match is None or not 0 <= int(match["port"]) < 2**16:
            raise ValueError(f"unknown transport {value!r}; there are: {', '.join(_SHORT)}, and tcp://host:port")
        return BindSpec(ChannelTransport.TcpWithHostname, value)

    @property
    def host(self) -> str:
        """Host of the address; empty if there is none."""
        match = _ADDRESS.fullmatch(self.address)
        return match["host"].strip("[]") if match else ""

    def __str__(self) -> str:
        return self.address or str(self.transport)


class ChannelAddr:
    """Addresses at which something can listen."""

    @staticmethod
    def any(transport: ChannelTransport) -> str:
        """Return an address of this transport that is free, in the form that workers take.

        Raises:
            NotImplementedError: nothing listens there here.
        """
        name = f"@monarch-slurm/{os.getuid()}/{secrets.token_hex(8)}"
        if transport is ChannelTransport.Unix:
            return f"ipc://{name}"
        if transport is ChannelTransport.Local:
            return f"inproc://{secrets.token_hex(8)}"
        hosts = {ChannelTransport.TcpWithLocalhost: "localhost", ChannelTransport.TcpWithHostname: socket.gethostname()}
        if transport not in hosts:
            raise NotImplementedError(f"nothing listens at {transport} here; there are Unix, Local and the Tcp ones")
        with socket.create_server(("", 0)) as probe:
            return f"tcp://{hosts[transport]}:{probe.getsockname()[1]}"
