"""What a host says of itself: plain values, read from files and limits within a moment; no device is touched."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from monarch_slurm.gpu import gpu_devices, gpu_platform
from monarch_slurm.native_build import built_native, torch_folder
from monarch_slurm.rdma.verbs_devices import ports
from monarch_slurm.wire.system_calls import refused

_ROOT = Path("/")
_PACKAGES = ("monarch_slurm", "torch", "torchft", "numpy", "pyzmq", "submitit")
_PROGRAMS = ("sbatch", "srun", "squeue", "scontrol", "sacct", "c++", "g++")
_OURS = ("monarch_slurm proc", "monarch_slurm zygote", "monarch_slurm.host", "monarch_slurm.job")

Facts = dict[str, Any]
"""Facts of one host: values that JSON knows, by name; None where nothing says."""


def collect(root: Path = _ROOT) -> Facts:
    """Return the facts of this host.

    Args:
        root: where ``sys``, ``proc`` and ``opt`` are; for tests.
    """
    return {
        "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0],
        "time": time.time(),
        "kernel": platform.release(),
        "refused_calls": [
            {"name": call.name, "since": call.since, "reason": reason, "without": call.without}
            for call, reason in refused()
        ],
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "programs": {name: shutil.which(name) is not None for name in _PROGRAMS},
        "job_id": os.environ.get("SLURM_JOB_ID"),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "memory_available_bytes": psutil.virtual_memory().available,
        "load": os.getloadavg()[0],
        "memlock_bytes": _limit(resource.RLIMIT_MEMLOCK),
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "shm": _space(root / "dev/shm"),
        "tmp": _space(Path(os.environ.get("TMPDIR") or root / "tmp")),
        "numa_balancing": _text(root / "proc/sys/kernel/numa_balancing"),
        "gpu_platform": gpu_platform(),
        "gpu_platform_set": bool(os.environ.get("MONARCH_SLURM_GPU_PLATFORM")),
        "gpu_driver": _gpu_driver(root),
        "rocm": _text(root / "opt/rocm/.info/version"),
        "torch_gpu": _torch_gpu(),
        "gpus": _gpus(root),
        "rdma": _rdma(root),
        "networks": _networks(root),
        "leftovers": _leftovers(),
        "native": sorted(built_native()),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _limit(which: int) -> int | None:
    """Return a soft limit; None when there is none."""
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _space(folder: Path) -> dict[str, int] | None:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return {"total_bytes": usage.total, "free_bytes": usage.free}


def _torch_gpu() -> str | None:
    """Return what the installed torch was made for, such as ``rocm 7.2``, without importing it."""
    folder = torch_folder()
    text = (_text(folder / "version.py") or "") if folder else ""
    for line in text.splitlines():
        name, _, value = line.partition("=")
        kind = {"hip": "rocm", "cuda": "cuda"}.get(name.partition(":")[0].strip())
        if kind and value.strip() != "None":
            return f"{kind} {value.strip().strip(chr(39)).strip(chr(34))}"
    return None


def _gpu_driver(root: Path) -> str | None:
    amd = _text(root / "sys/module/amdgpu/version")
    if amd or (root / "sys/module/amdgpu").is_dir():
        return f"amdgpu {amd or 'of the kernel'}"
    nvidia = _text(root / "sys/module/nvidia/version")
    return f"nvidia {nvidia}" if nvidia else None


def _gpus(root: Path) -> list[Facts]:
    cards = {}
    for card in sorted((root / "sys/class/drm").glob("card*")):
        if card.name[4:].isdigit():
            cards[(card / "device").resolve().name] = card / "device"
    found = []
    for device in gpu_devices(root):
        card = cards.get(device.pci_address, root / "nowhere")
        found.append(
            {
                "name": device.name,
                "platform": device.platform,
                "pci_address": device.pci_address,
                "numa_node": device.numa_node,
                "partition": "/".join(filter(None, [device.compute_partition, device.memory_partition])) or None,
                "memory_bytes": device.memory_bytes or _number(card / "mem_info_vram_total"),
                "memory_used_bytes": _number(card / "mem_info_vram_used"),
                "uncorrectable_errors": _uncorrectable(card / "ras"),
            }
        )
    return found


def _uncorrectable(ras: Path) -> int | None:
    """Return the sum of the ``ue`` counters of an AMD GPU's blocks (amdgpu's RAS files)."""
    counts = []
    for file in ras.glob("*_err_count"):
        for line in (_text(file) or "").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "ue" and value.strip().isdigit():
                counts.append(int(value))
    return sum(counts) if counts else None


def _rdma(root: Path) -> list[Facts]:
    sysfs = root / "sys/class/infiniband"
    usable = {(port.device, port.number): port for port in ports(sysfs)}
    found = []
    for port in sorted(sysfs.glob("*/ports/*")):
        device, number = port.parent.parent.name, int(port.name)
        best = usable.get((device, number))
        found.append(
            {
                "device": device,
                "port": number,
                "state": (_text(port / "state") or "").partition(":")[2].strip() or None,
                "link_layer": _text(port / "link_layer"),
                "rate_gbit_s": float((_text(port / "rate") or "0").partition(" ")[0]),
                "gid": None if best is None else {"index": best.gid.index, "kind": best.gid.kind},
                "routable": best is not None and not best.gid.address.is_link_local,
            }
        )
    return found


def _networks(root: Path) -> dict[str, Facts]:
    found = {}
    for folder in sorted((root / "sys/class/net").glob("*")):
        if folder.name == "lo" or _text(folder / "operstate") == "down":
            continue
        speed = _number(folder / "speed")
        found[folder.name] = {
            "mtu": _number(folder / "mtu"),
            "speed_mbit_s": speed if speed and speed > 0 else None,
            "physical": (folder / "device").exists(),
        }
    return found


def _leftovers() -> list[Facts]:
    """Return this user's processes of this package that belong to another job than this one."""
    mine, me = os.environ.get("SLURM_JOB_ID", ""), os.getuid()
    found = []
    for process in psutil.process_iter(["uids", "name", "cmdline"]):
        try:
            command = " ".join(process.info["cmdline"] or ())
            if process.info["uids"].real != me or not any(mark in command or mark in process.name() for mark in _OURS):
                continue
            job = process.environ().get("SLURM_JOB_ID", "")
        except psutil.Error:
            continue
        if job != mine:
            found.append({"pid": process.pid, "job_id": job})
    return found


def _number(path: Path) -> int | None:
    text = _text(path)
    try:
        return int(text) if text else None
    except ValueError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
