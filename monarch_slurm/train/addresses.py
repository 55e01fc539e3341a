"""Sockets on one given address; torch and torchft like to bind every interface, and to be told names."""

from __future__ import annotations

import ipaddress
import socket

from monarch_slurm.errors import ConfigError
from monarch_slurm.host import interfaces as host_interfaces
from monarch_slurm.wire.ports import listen_tcp


def family_of(address: str) -> socket.AddressFamily:
    """Return the socket family of an IP address.

    Raises:
        ConfigError: it is not an IP address.
    """
    try:
        version = ipaddress.ip_address(address).version
    except ValueError as error:
        raise ConfigError(f"{address!r} is not an IP address: trainers bind addresses, not names") from error
    return socket.AF_INET6 if version == 6 else socket.AF_INET


def in_url(address: str) -> str:
    """Return an IP address as it stands before ``:port``: IPv6 in brackets."""
    return f"[{address}]" if family_of(address) == socket.AF_INET6 else address


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a TCP socket that listens on ``address`` and nowhere else; port 0 takes a free one.

    Raises:
        ConfigError: ``address`` is not one of this host's, or the port is taken.
    """
    if port == 0:
        family_of(address)
        try:
            return listen_tcp(address, 1024)
        except OSError as error:
            raise ConfigError(f"cannot listen on {in_url(address)}: {error.strerror}") from error
    server = socket.socket(family_of(address), socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((address, port))
        server.listen(1024)
    except OSError as error:
        server.close()
        raise ConfigError(f"cannot listen on {in_url(address)}:{port}: {error.strerror}") from error
    return server


def interface_of(address: str) -> str:
    """Return the name of the network interface that holds ``address``, such as ``lo`` or ``eth0``.

    Raises:
        ConfigError: no interface of this host has it.
    """
    family_of(address)
    name = host_interfaces.interface_of(address)
    if name is None:
        raise ConfigError(f"no network interface of this host has the address {address}")
    return name
