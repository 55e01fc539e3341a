"""GPUs of this machine: which platform, which devices, and their memory.

- `facts`: platform, devices, partition modes, read from sysfs and procfs; nothing touches a device
- `libraries`: where the GPU runtime and RCCL or NCCL are found, and the native module
- `memory`: mapped allocations, dmabuf and IPC export, tensors given to another process
"""

from monarch_slurm.gpu.facts import GpuDevice, gpu_devices, gpu_platform
from monarch_slurm.gpu.memory import (
    Dmabuf,
    GpuMemory,
    export_dmabuf,
    receive_fds,
    receive_memory,
    receive_tensor,
    send_fds,
    send_memory,
    send_tensor,
)

__all__ = [
    "Dmabuf",
    "GpuDevice",
    "GpuMemory",
    "export_dmabuf",
    "gpu_devices",
    "gpu_platform",
    "receive_fds",
    "receive_memory",
    "receive_tensor",
    "send_fds",
    "send_memory",
    "send_tensor",
]
