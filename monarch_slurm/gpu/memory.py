"""GPU memory that can be given away: to another process as a file descriptor (see `sharing`), to a NIC as a dmabuf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.gpu.libraries import gpu_runtime, native

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Dmabuf:
    """A dmabuf of device memory.

    Args:
        fd: the descriptor; the holder closes it.
        offset_bytes: where the asked-for range begins in it: exports are whole pages of the host.
        length_bytes: size of the exported range.
    """

    fd: int
    offset_bytes: int
    length_bytes: int


class GpuMemory:
    """Physical memory of one device, mapped readable and writable there until `close` or the last reference is gone.

    Make it with `allocate`, or with `receive_memory` from another process. Tensors made by `tensor` keep it alive.
    """

    def __init__(self, mapping: Any) -> None:
        self._mapping: Any = mapping

    @classmethod
    def allocate(cls, size_bytes: int, device: int = 0) -> GpuMemory:
        """Map at least ``size_bytes`` of new memory of ``device``; the size is rounded up to the driver's granularity.

        Raises:
            MonarchSlurmError: no GPU runtime, no such device, no memory left.
        """
        return cls(native().Mapping.create(gpu_runtime(), device, size_bytes))

    @property
    def address(self) -> int:
        """Device address of the first byte."""
        return int(self._live.address)

    @property
    def size_bytes(self) -> int:
        """Size, a multiple of the driver's granularity."""
        return int(self._live.bytes)

    @property
    def device(self) -> int:
        """Index of the device whose memory it is."""
        return int(self._live.device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 2}

    def tensor(self) -> torch.Tensor:
        """Return the memory as a uint8 tensor of shape ``(size_bytes,)``; ``.view(dtype)`` makes others of it."""
        import torch

        return torch.as_tensor(self, device=f"cuda:{self.device}")

    def export_fd(self) -> int:
        """Return a new descriptor of the memory, for `send_fds`; the caller closes it."""
        return int(self._live.export_fd())

    def read(self, size_bytes: int, offset_bytes: int = 0) -> bytes:
        """Copy bytes to the host."""
        self._check_range(size_bytes, offset_bytes)
        data: bytes = gpu_runtime().read(self.device, self.address + offset_bytes, size_bytes)
        return data

    def write(self, data: bytes, offset_bytes: int = 0) -> None:
        """Copy bytes to the device."""
        self._check_range(len(data), offset_bytes)
        gpu_runtime().write(self.device, self.address + offset_bytes, data)

    def close(self) -> None:
        """Unmap and release the memory now; nothing may use it any more."""
        self._mapping = None

    @property
    def _live(self) -> Any:
        if self._mapping is None:
            raise MonarchSlurmError("this GpuMemory was closed")
        return self._mapping

    def _check_range(self, size_bytes: int, offset_bytes: int) -> None:
        if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > self.size_bytes:
            raise ValueError(
                f"bytes {offset_bytes} to {offset_bytes + size_bytes} of a memory of {self.size_bytes} bytes"
            )

    def __repr__(self) -> str:
        if self._mapping is None:
            return "GpuMemory(closed)"
        return f"GpuMemory(device={self.device}, address={self.address:#x}, size_bytes={self.size_bytes})"


def export_dmabuf(address: int, size_bytes: int, device: int = 0) -> Dmabuf:
    """Export device memory as a dmabuf, such as a NIC can register.

    Args:
        address: any device address; it need not be aligned.
        size_bytes: size of the range.
        device: index of the device whose memory it is.

    Raises:
        MonarchSlurmError: the runtime cannot export (too old, or the kernel lacks support).
    """
    return Dmabuf(*gpu_runtime().export_dmabuf(device, address, size_bytes))
