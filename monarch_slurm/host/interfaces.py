"""Network interfaces of this machine: which one has an address, and which one is the fastest."""

from __future__ import annotations

import functools
import ipaddress
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

_SYSFS = Path("/sys")


def addresses() -> dict[str, list[str]]:
    """Return the addresses of each interface, IPv4 first; link-local IPv6 ones are left out, they need a scope."""
    found: dict[str, list[str]] = {}
    for interface, entries in psutil.net_if_addrs().items():
        usable = [entry for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        usable.sort(key=lambda entry: entry.family != socket.AF_INET)
        found[interface] = [entry.address for entry in usable if "%" not in entry.address]
    return found


def interface_of(address: str) -> str | None:
    """Return the name of the interface that holds ``address``, such as ``lo`` or ``eth0``; None if none does."""
    wanted = ipaddress.ip_address(address)
    loopback: str | None = None
    for name, held in addresses().items():
        found = [ipaddress.ip_address(entry) for entry in held]
        if wanted in found:
            return name
        if any(entry.is_loopback for entry in found):
            loopback = name
    # The loopback interface answers for all of 127.0.0.0/8 but lists one address.
    return loopback if wanted.is_loopback else None


def link_speed(interface: str, sysfs: Path = _SYSFS) -> float:
    """Return the speed of a link in Mbit/s, as the kernel or its InfiniBand port says it; 0 if unknown."""
    net = sysfs / "class/net" / interface
    speeds = [0.0]
    for file in [net / "speed", *net.glob("device/infiniband/*/ports/*/rate")]:
        try:
            words = file.read_text().split()  # "25000", or "200 Gb/sec (4X HDR)"
            speeds.append(float(words[0]) * (1000.0 if file.name == "rate" else 1.0))
        except (OSError, ValueError, IndexError):  # a link that is down has no speed
            continue
    return max(speeds)


def fastest_address(held: Mapping[str, list[str]] | None = None, sysfs: Path = _SYSFS) -> str | None:
    """Return the address of this machine on its fastest link that is up; None if there is only loopback.

    Of links that are as fast the one with the lowest address counts, so that nodes of a kind choose the same network.

    Args:
        held: the addresses of each interface; None asks the system.
    """
    candidates = []
    for interface, found in (addresses() if held is None else held).items():
        net = sysfs / "class/net" / interface
        if _read(net / "operstate") not in ("up", "unknown", "") or (net / "bridge").exists():
            continue  # a bridge to containers or guests leads nowhere
        for text in found[:1]:
            address = ipaddress.ip_address(text)
            if not address.is_loopback and not address.is_link_local:
                candidates.append((-link_speed(interface, sysfs), address.version, int(address), text))
    return min(candidates)[-1] if candidates else None


@functools.lru_cache(maxsize=8)
def collective_settings(address: str) -> dict[str, str]:
    """Return the variables that have gloo and NCCL (RCCL) use the interface of ``address``, but for those set already.

    Left to themselves they take an interface by its name, or by what the machine's own name stands for.
    """
    interface = None if ipaddress.ip_address(address).is_loopback else interface_of(address)
    if interface is None:
        return {}
    wanted = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}  # without "=" it is a prefix
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
