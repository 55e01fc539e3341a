"""Which RDMA device, port and GID a process uses, from what the kernel tells in ``/sys/class/infiniband``."""

from __future__ import annotations

import ipaddress
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from monarch_slurm.errors import ConfigError
from monarch_slurm.gpu import VisibilityError, gpu_devices, gpu_platform, visible_indices

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
    bridges: tuple[str, ...] = ()
    """What lies between the host and the device, outermost first: PCIe roots, bridges and switches."""


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
                found.append(Port(device.name, int(folder.name), best, node, rate, bridges(device / "device")))
    return found


def bridges(device: Path) -> tuple[str, ...]:
    """Return what lies between the host and the PCI device that the sysfs folder ``device`` is, or links to."""
    names = device.resolve().parts
    start = next((index for index, name in enumerate(names) if name.startswith("pci")), len(names))
    return names[start:-1]


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


def choose(
    found: list[Port],
    target: str,
    numa_nodes: set[int],
    gpu: tuple[str, ...] = (),
    gpus: Callable[[], list[tuple[str, ...]]] = list,
) -> Port | None:
    """Return the port to use, or None if there is none.

    The nearest shares most PCIe bridges with the process's GPU, else it is on a NUMA node of the process's CPUs.

    Args:
        found: from `ports`.
        target: setting ``rdma_ibverbs_target``: empty for the nearest and fastest, ``nic:<name>[:<port>]`` for this
            one, ``cpu:<NUMA node>`` or ``gpu:<index>`` for the one that is nearest to these.
        numa_nodes: those that this process runs on.
        gpu: `bridges` of the GPU that this process uses; empty if that is not known.
        gpus: returns `bridges` of every GPU of this host, in the order of their indices.

    Raises:
        ConfigError: ``target`` has another form, or names what is not there or not active.
    """
    kind, _, name = target.partition(":")
    if kind == "nic" and name:
        return _named(found, target, name)
    if kind == "cpu" and name.isdecimal():
        numa_nodes, gpu = {int(name)}, ()
    elif kind == "gpu" and name.isdecimal():
        there = gpus()
        if int(name) >= len(there):
            raise ConfigError(f"rdma_ibverbs_target={target!r}: this host has {len(there)} GPUs")
        gpu = there[int(name)]
    elif target:
        raise ConfigError(
            f"rdma_ibverbs_target={target!r}: nic:<name>, nic:<name>:<port>, cpu:<NUMA node> or gpu:<index> expected"
        )

    def merit(port: Port) -> tuple[int, bool, tuple[bool, bool, bool], float]:
        shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(port.bridges, gpu, strict=False))))
        return shared, port.numa_node in numa_nodes, port.gid.score, port.rate

    return max(found, key=merit, default=None)


def _named(found: list[Port], target: str, name: str) -> Port:
    device, _, number = name.partition(":")
    for port in found:
        if port.device == device and number in ("", str(port.number)):
            return port
    active = ", ".join(f"{port.device}:{port.number}" for port in found) or "none"
    raise ConfigError(f"rdma_ibverbs_target={target!r} is not there or not active; active ports: {active}")


def all_gpus(pci_devices: Path = Path("/sys/bus/pci/devices")) -> list[tuple[str, ...]]:
    """Return `bridges` of every GPU of this host, whether this process may see it or not."""
    found = [device for device in gpu_devices() if device.platform == gpu_platform()]
    return [bridges(pci_devices / device.pci_address) for device in found]


def own_gpu(current: int | None = None, pci_devices: Path = Path("/sys/bus/pci/devices")) -> tuple[str, ...]:
    """Return `bridges` of the GPU that this process uses; nothing if there is none, or that is not known.

    Args:
        current: index of its current device, among those that it may see. Not needed if that is one.
        pci_devices: the kernel's folder of them.
    """
    devices = [device for device in gpu_devices() if device.platform == gpu_platform()]
    try:
        seen = visible_indices(gpu_platform(), len(devices), [device.uuid for device in devices], os.environ)
    except VisibilityError:
        return ()
    if len(seen) == 1:
        current = 0
    if current is None or current >= len(seen):
        return ()
    return bridges(pci_devices / devices[seen[current]].pci_address)


def current_gpu() -> int | None:
    """Return the index of torch's current device; None in a process whose torch uses no GPU yet."""
    torch = sys.modules.get("torch")
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else None


def own_numa_nodes(cpus: set[int] | None = None, sysfs: Path = Path("/sys/devices/system/cpu")) -> set[int]:
    """Return the NUMA nodes of the CPUs that this process may run on."""
    mine = os.sched_getaffinity(0) if cpus is None else cpus
    return {int(node.name[4:]) for cpu in mine for node in (sysfs / f"cpu{cpu}").glob("node[0-9]*")}


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the index has no address, or the device is going away
        return ""
