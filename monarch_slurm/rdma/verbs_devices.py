"""Which RDMA device, port and GID a process uses, from what the kernel tells in ``/sys/class/infiniband``."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from monarch_slurm.errors import ConfigError

SYSFS = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Gid:
    """One entry of a port's table of addresses: index, address, and type (``"RoCE v2"``, ``"IB/RoCE v1"``)."""

    index: int
    address: ipaddress.IPv6Address
    kind: str

    @property
    def score(self) -> tuple[bool, bool, bool]:
        """Larger is better: RoCE v2 (it is routed) before v1, IPv4 before other addresses, link-local last."""
        mapped = self.address.ipv4_mapped is not None
        return "v2" in self.kind.lower(), mapped, not self.address.is_link_local


@dataclass(frozen=True)
class Port:
    """A port of a device that could be used, with the best of its addresses."""

    device: str
    number: int
    gid: Gid
    numa_node: int
    rate: float
    """Gbit/s."""


def ports(sysfs: Path = SYSFS) -> list[Port]:
    """Return every port that is active and has an address."""
    found = []
    for device in sorted(sysfs.iterdir()) if sysfs.is_dir() else []:
        node = int(_text(device / "device" / "numa_node") or -1)
        for folder in sorted((device / "ports").iterdir()):
            if not _text(folder / "state").endswith("ACTIVE"):
                continue
            best = max(gids(folder), key=lambda gid: gid.score, default=None)
            if best is not None:
                rate = float(_text(folder / "rate").partition(" ")[0] or 0)
                found.append(Port(device.name, int(folder.name), best, node, rate))
    return found


def gids(port: Path) -> Iterator[Gid]:
    """Yield the addresses of the port whose folder is ``port``, in the order of their indices."""
    for file in sorted((port / "gids").iterdir(), key=lambda file: int(file.name)):
        text = _text(file)
        if not text:
            continue
        address = ipaddress.IPv6Address(text)
        # An entry with a prefix alone is not an address yet.
        if int(address) & (2**64 - 1):
            yield Gid(int(file.name), address, _text(port / "gid_attrs" / "types" / file.name))


def choose(found: list[Port], target: str, numa_nodes: set[int]) -> Port | None:
    """Return the port to use, or None if there is none.

    Args:
        found: from `ports`.
        target: setting ``rdma_ibverbs_target``: empty for the nearest and fastest, or ``nic:<name>[:<port>]``.
        numa_nodes: those that this process runs on.

    Raises:
        ConfigError: ``target`` has another form, or names a port that is not active.
    """
    if target:
        kind, _, name = target.partition(":")
        device, _, number = name.partition(":")
        if kind != "nic" or not device:
            raise ConfigError(f"rdma_ibverbs_target={target!r}: nic:<name> or nic:<name>:<port> expected")
        for port in found:
            if port.device == device and number in ("", str(port.number)):
                return port
        active = ", ".join(f"{port.device}:{port.number}" for port in found) or "none"
        raise ConfigError(f"rdma_ibverbs_target={target!r} is not there or not active; active ports: {active}")
    return max(found, key=lambda port: (port.numa_node in numa_nodes, port.gid.score, port.rate), default=None)


def own_numa_nodes(cpus: set[int] | None = None, sysfs: Path = Path("/sys/devices/system/cpu")) -> set[int]:
    """Return the NUMA nodes of the CPUs that this process may run on."""
    mine = os.sched_getaffinity(0) if cpus is None else cpus
    return {int(node.name[4:]) for cpu in mine for node in (sysfs / f"cpu{cpu}").glob("node[0-9]*")}


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the index has no address, or the device is going away
        return ""
