"""GPU facts from recorded sysfs and procfs trees."""

from __future__ import annotations

from pathlib import Path

from trees import write_tree

from monarch_slurm.gpu import GpuDevice, gpu_devices


def test_no_gpu(tmp_path: Path) -> None:
    assert gpu_devices(tmp_path) == []


def test_amd_gpu_beside_a_cpu(tmp_path: Path) -> None:
    nodes = "sys/class/kfd/kfd/topology/nodes"
    pci = "sys/bus/pci/devices/0002:c1:00.0"
    write_tree(
        tmp_path,
        {
            f"{nodes}/0/properties": "cpu_cores_count 96\nsimd_count 0\n",
            f"{nodes}/10/properties": "simd_count 1216\ngfx_target_version 90402\nlocation_id 49408\n"
            "domain 2\nunique_id 175\n",
            f"{nodes}/10/mem_banks/0/properties": "heap_type 1\nsize_in_bytes 206141652992\n",
            f"{nodes}/2/properties": "simd_count 416\ngfx_target_version 90010\nlocation_id 49417\ndomain 2\n",
            f"{pci}/numa_node": "1\n",
            f"{pci}/current_compute_partition": "SPX\n",
            f"{pci}/current_memory_partition": "NPS1\n",
        },
    )
    second = GpuDevice("rocm", 1, "gfx942", "0002:c1:00.0", 1, "SPX", "NPS1", 206141652992, "GPU-00000000000000af")
    partition = GpuDevice("rocm", 0, "gfx90a", "0002:c1:01.1", None)
    assert gpu_devices(tmp_path) == [partition, second]


def test_nvidia_gpu_without_numa_node(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            "proc/driver/nvidia/gpus/0000:3b:00.0/information": "Model: \t\t NVIDIA H200\n"
            "IRQ:   1\nGPU UUID: \t GPU-1a2b-3c\n",
            "sys/bus/pci/devices/0000:3b:00.0/numa_node": "-1\n",
        },
    )
    assert gpu_devices(tmp_path) == [GpuDevice("cuda", 0, "NVIDIA H200", "0000:3b:00.0", None, uuid="GPU-1a2b-3c")]
