"""Trees of sysfs as machines with AMD GPUs have them, written from the kernel's documented formats."""

from __future__ import annotations

from pathlib import Path


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def mi300x_node(root: Path, partitions: int = 1, cores_per_socket: int = 8) -> Path:
    """Two sockets with four MI300X each; core ``n`` has the hardware threads ``n`` and ``n + 2 * cores_per_socket``."""
    cores = 2 * cores_per_socket
    files = {}
    for cpu in range(2 * cores):
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = (
            f"{cpu % cores},{cpu % cores + cores}\n"
        )
    for node in range(2):
        files[f"sys/class/kfd/kfd/topology/nodes/{node}/properties"] = "cpu_cores_count 8\nsimd_count 0\n"
    for gpu in range(8):
        first = gpu // 4 * cores_per_socket
        near = f"{first}-{first + cores_per_socket - 1}"
        near += f",{first + cores}-{first + cores + cores_per_socket - 1}"
        pci = f"sys/bus/pci/devices/0000:{gpu + 5:02x}:00.0"
        files[f"{pci}/numa_node"] = f"{gpu // 4}\n"
        files[f"{pci}/local_cpulist"] = near + "\n"
        files[f"{pci}/current_compute_partition"] = "SPX\n" if partitions == 1 else "CPX\n"
        for part in range(partitions):
            files[f"sys/class/kfd/kfd/topology/nodes/{2 + gpu * partitions + part}/properties"] = (
                f"simd_count {1216 // partitions}\ngfx_target_version 90402\nlocation_id {(gpu + 5) << 8 | part}\n"
                f"domain 0\nunique_id {0xA0 + gpu * partitions + part}\n"
            )
    write_tree(root, files)
    return root
