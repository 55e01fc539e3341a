"""GPUs of this machine: which platform, which devices, and their memory.

- `facts`: platform, devices, partition modes, read from sysfs and procfs; nothing touches a device
- `visibility`: which of them a process sees, by the variables that the GPU runtimes read
- `placement`: which of them, and which cores, each proc of a host gets
- `libraries`: where the GPU runtime and RCCL or NCCL are found, and the native module
- `memory`: mapped allocations, dmabuf export
- `sharing`: memory and tensors given to another process
"""

from monarch_slurm.gpu.facts import GpuDevice, gpu_devices, gpu_platform
from monarch_slurm.gpu.memory import Dmabuf, GpuMemory, export_dmabuf
from monarch_slurm.gpu.placement import Place, PlacementError, parse_cpu_list, places
from monarch_slurm.gpu.sharing import receive_fds, receive_memory, receive_tensor, send_fds, send_memory, send_tensor
from monarch_slurm.gpu.visibility import VisibilityError, restrict_to, settle, visible_indices

__all__ = [
    "Dmabuf",
    "GpuDevice",
    "GpuMemory",
    "Place",
    "PlacementError",
    "VisibilityError",
    "export_dmabuf",
    "gpu_devices",
    "gpu_platform",
    "parse_cpu_list",
    "places",
    "receive_fds",
    "receive_memory",
    "receive_tensor",
    "restrict_to",
    "send_fds",
    "send_memory",
    "send_tensor",
    "settle",
    "visible_indices",
]
