"""What GPUs a machine has, read from files: no device is opened, no GPU runtime loaded, no fork made unsafe."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from monarch_slurm.native_build import gpu_platform

__all__ = ["GpuDevice", "gpu_devices", "gpu_platform"]

_ROOT = Path("/")


@dataclass(frozen=True)
class GpuDevice:
    """One GPU, or one partition of a partitioned GPU (each is a device of its own to programs).

    Args:
        platform: ``rocm`` or ``cuda``.
        index: its place among this machine's devices, in the order of the kernel.
        name: what the driver calls it; on AMD the target, such as ``gfx942``.
        pci_address: ``domain:bus:device.function``.
        numa_node: the nearest NUMA node; None when the machine does not say.
        compute_partition: on AMD ``SPX``, ``DPX``, ``QPX`` or ``CPX``; None when it cannot be partitioned.
        memory_partition: on AMD ``NPS1``, ``NPS2`` or ``NPS4``; None when it cannot be partitioned.
        memory_bytes: memory of the device; None when no file says.
        uuid: what names it in variables such as ``ROCR_VISIBLE_DEVICES``: ``GPU-…``; None when no file says.
    """

    platform: str
    index: int
    name: str
    pci_address: str
    numa_node: int | None
    compute_partition: str | None = None
    memory_partition: str | None = None
    memory_bytes: int | None = None
    uuid: str | None = None


def gpu_devices(root: Path = _ROOT) -> list[GpuDevice]:
    """Return the GPUs of this machine, AMD's first; an empty list when there are none.

    Args:
        root: where ``sys`` and ``proc`` are; for tests.
    """
    return _amd_devices(root) + _nvidia_devices(root)


def _amd_devices(root: Path) -> list[GpuDevice]:
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    found: list[GpuDevice] = []
    numbered = [path for path in nodes.glob("*") if path.name.isdigit()]
    for node in sorted(numbered, key=lambda path: int(path.name)):
        properties = _properties(node / "properties")
        if not properties.get("simd_count"):
            continue  # a CPU
        location = properties.get("location_id", 0)
        pci = f"{properties.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"
        # Partitions share one PCI device whose function 0 holds the modes.
        device = _first_folder(root / "sys/bus/pci/devices" / pci, root / "sys/bus/pci/devices" / (pci[:-1] + "0"))
        target = properties.get("gfx_target_version", 0)
        name = f"gfx{target // 10000}{target // 100 % 100:x}{target % 100:x}"
        found.append(
            GpuDevice(
                "rocm",
                len(found),
                name,
                pci,
                _numa_node(device),
                _text(device / "current_compute_partition"),
                _text(device / "current_memory_partition"),
                _amd_memory_bytes(node),
                f"GPU-{properties['unique_id']:016x}" if properties.get("unique_id") else None,
            )
        )
    return found


def _nvidia_devices(root: Path) -> list[GpuDevice]:
    found: list[GpuDevice] = []
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        information = _text(folder / "information") or ""
        model = re.search(r"^Model:\s*(.+)$", information, re.MULTILINE)
        uuid = re.search(r"^GPU UUID:\s*(GPU-\S+)$", information, re.MULTILINE)
        numa = _numa_node(root / "sys/bus/pci/devices" / folder.name)
        name = model[1].strip() if model else "NVIDIA GPU"
        found.append(GpuDevice("cuda", len(found), name, folder.name, numa, uuid=uuid[1] if uuid else None))
    return found


def _amd_memory_bytes(node: Path) -> int | None:
    sizes = []
    for bank in node.glob("mem_banks/*/properties"):
        properties = _properties(bank)
        if properties.get("heap_type") in (1, 2):  # frame buffer, visible to the CPU or not
            sizes.append(properties.get("size_in_bytes", 0))
    return sum(sizes) or None


def _properties(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in (_text(path) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _numa_node(device: Path) -> int | None:
    text = _text(device / "numa_node")
    return int(text) if text is not None and text.isdigit() else None  # -1: the machine does not say


def _first_folder(*paths: Path) -> Path:
    return next((path for path in paths if path.is_dir()), paths[0])


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
