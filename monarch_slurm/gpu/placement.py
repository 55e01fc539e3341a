"""Which devices and which cores each of a host's procs gets."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch_slurm.errors import ConfigError
from monarch_slurm.gpu.facts import GpuDevice

_SYSFS = Path("/sys")


class PlacementError(ConfigError):
    """A host has fewer devices than its procs ask for."""


@dataclass(frozen=True)
class Place:
    """What one proc gets.

    Attributes:
        devices: positions among the devices that are visible on the host.
        cpus: CPUs to run on, near those devices; empty when all are as near.
    """

    devices: tuple[int, ...]
    cpus: tuple[int, ...]


def places(
    visible: Sequence[GpuDevice],
    wanted: Sequence[Sequence[int]],
    cpus: Collection[int] | None = None,
    sysfs: Path = _SYSFS,
) -> list[Place]:
    """Return what each proc of a host gets: the devices it asks for, and its share of the cores near them.

    Cores that are near several procs' devices are dealt out among those procs evenly, whole cores with all their
    hardware threads; when there are fewer cores than procs, each gets all of them.

    Args:
        visible: the devices that programs see on this host, in that order.
        wanted: for each proc, positions in ``visible``; a device may be asked for by several.
        cpus: those that may be used; None: those of this process.

    Raises:
        PlacementError: a position that is not there.
    """
    usable = set(os.sched_getaffinity(0) if cpus is None else cpus)
    near: list[frozenset[int]] = []
    for devices in wanted:
        beyond = [index for index in devices if not 0 <= index < len(visible)]
        if beyond:
            names = ", ".join(sorted({device.name for device in visible})) or "none"
            raise PlacementError(
                f"GPU {beyond[0]} was asked for, but {len(visible)} can be seen here ({names}): ask Slurm for more "
                "(--gpus-per-node), or spawn fewer procs per host"
            )
        near.append(frozenset().union(*(_near(visible[index], usable, sysfs) for index in devices)))
    shares: dict[frozenset[int], list[tuple[int, ...]]] = {}
    for group in set(near):
        shares[group] = _deal(_cores(group, sysfs), near.count(group))
    result = []
    for devices, group in zip(wanted, near, strict=True):
        result.append(Place(tuple(devices), shares[group].pop(0) if devices else ()))
    return result


def parse_cpu_list(text: str) -> list[int]:
    """Return the numbers in a list as the kernel writes it, such as ``0-3,8``.

    Raises:
        ValueError: it is no such list.
    """
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{text!r}: a list such as '0-3,8' expected")
        found += range(int(first), int(last or first) + 1)
    return found


def _near(device: GpuDevice, usable: set[int], sysfs: Path) -> set[int]:
    pci = sysfs / "bus/pci/devices" / device.pci_address
    for file in (pci / "local_cpulist", pci.with_name(pci.name[:-1] + "0") / "local_cpulist"):
        try:
            local = usable & set(parse_cpu_list(file.read_text()))
        except OSError:
            continue
        if local:
            return local
    return usable


def _cores(cpus: Collection[int], sysfs: Path) -> list[tuple[int, ...]]:
    """Group CPUs by the core that they are hardware threads of, in the order of the first thread."""
    cores: dict[tuple[int, ...], None] = {}
    for cpu in sorted(cpus):
        try:
            text = (sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
            threads = tuple(sorted(set(parse_cpu_list(text)) & set(cpus)))
        except OSError:
            threads = (cpu,)
        cores[threads] = None
    return list(cores)


def _deal(cores: list[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    everything = tuple(cpu for core in cores for cpu in core)
    if len(cores) < count:
        return [everything] * count
    edges = [len(cores) * index // count for index in range(count + 1)]
    return [tuple(cpu for core in cores[start:end] for cpu in core) for start, end in itertools.pairwise(edges)]
