"""Addresses of machines by name."""

from __future__ import annotations

import enum
import ipaddress
import socket


class AddrType(enum.Enum):
    """Which kind of IP address is wanted."""

    Default = "default"
    IPv4 = "ipv4"
    IPv6 = "ipv6"


_FAMILIES = {
    AddrType.Default: socket.AF_UNSPEC,
    AddrType.IPv4: socket.AF_INET,
    AddrType.IPv6: socket.AF_INET6,
}


def get_sockaddr(hostname: str, port: int, addr_type: AddrType = AddrType.Default) -> str:
    """Return ``IP:port`` or ``[IPv6]:port`` of ``hostname``, as a URL has it.

    Raises:
        RuntimeError: it has no address of that kind.
    """
    ip = get_ipaddr(hostname, port, addr_type)
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def get_ipaddr(hostname: str, port: int, addr_type: AddrType = AddrType.Default) -> str:
    """Return the IP address of ``hostname``: IPv6 if there is a choice, never a link-local address.

    Raises:
        RuntimeError: it has no address of that kind.
    """
    try:
        found = socket.getaddrinfo(hostname, port, family=_FAMILIES[addr_type], type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise RuntimeError(f"{hostname} has no address: {error.strerror}") from None
    for family in (socket.AF_INET6, socket.AF_INET):
        for this_family, _, _, _, address in found:
            ip = str(address[0])
            if this_family == family and not ipaddress.ip_address(ip.partition("%")[0]).is_link_local:
                return ip
    raise RuntimeError(f"{hostname} has no {addr_type.value} address but link-local ones")
