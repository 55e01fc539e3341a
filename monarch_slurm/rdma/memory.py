"""Where the bytes of a tensor or memoryview lie, and what keeps them there.

Memory of a GPU has no address that the CPU may touch. Engines that cannot take it as it is get host memory that its
`Stager` copies from or to (`bounce`).
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from dataclasses import dataclass
from typing import Any, cast

from monarch_slurm.py_buffer import PyBuffer, get_buffer, release_buffer
from monarch_slurm.tensor_memory import check_memory


class Stager:
    """Memory of a device, which the CPU reaches by copies only; they return when they are complete.

    Args:
        tensor: contiguous; `bytes` is the same memory as a flat uint8 tensor.
    """

    def __init__(self, tensor: Any) -> None:
        self._torch = sys.modules["torch"]
        self.bytes = tensor.detach().reshape(-1).view(self._torch.uint8)

    def pinned(self, nbytes: int) -> Any:
        """Return ``nbytes`` of host memory that the device copies from and to quickly, as a tensor."""
        return self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=self.bytes.device.type == "cuda")

    def to_host(self, offset: int, address: int, nbytes: int) -> None:
        """Copy ``nbytes`` from ``offset`` in the device memory to the host ``address``."""
        host_tensor(address, nbytes).copy_(self.bytes[offset : offset + nbytes])

    def from_host(self, offset: int, address: int, nbytes: int) -> None:
        """Copy ``nbytes`` from the host ``address`` to ``offset`` in the device memory."""
        self.bytes[offset : offset + nbytes].copy_(host_tensor(address, nbytes))
        self._wait()

    def copy(self, other: Stager, nbytes: int) -> None:
        """Copy the first ``nbytes`` of the other memory to the start of this one."""
        self.bytes[:nbytes].copy_(other.bytes[:nbytes])
        self._wait()

    def _wait(self) -> None:
        if self.bytes.device.type == "cuda":
            self._torch.cuda.current_stream(self.bytes.device).synchronize()


def host_tensor(address: int, nbytes: int) -> Any:
    """Return host memory as a uint8 tensor. It keeps nothing alive."""
    torch = sys.modules["torch"]
    return torch.frombuffer(view_of(address, nbytes), dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class Memory:
    """A contiguous piece of memory of this process.

    Attributes:
        address: of the first byte: in host memory, or on the device if there is a stager.
        nbytes: length in bytes.
        readonly: it must not be written.
        keep: what keeps the memory where it is, as long as this object lives.
        anchor: an object that dies no later than the memory does, or None when there is none that can tell.
        stager: for memory of a device; None for host memory.
    """

    address: int
    nbytes: int
    readonly: bool
    keep: object
    anchor: object | None = None
    stager: Stager | None = None


class _Export:
    """Holds a buffer export, so that its owner can neither move nor free it (a bytearray cannot be resized)."""

    def __init__(self, data: memoryview) -> None:
        raw = PyBuffer()
        get_buffer(data, ctypes.byref(raw), 0)
        self.address = raw.buf or 0
        self.nbytes = int(raw.len)
        self.readonly = bool(raw.readonly)
        weakref.finalize(self, release_buffer, ctypes.byref(raw)).atexit = False


def memory_of(data: Any) -> Memory:
    """Return where ``data`` lies.

    Raises:
        ValueError: it is neither a contiguous tensor nor a C-contiguous memoryview, or a tensor without memory.
    """
    if isinstance(data, memoryview):
        if data.c_contiguous:
            export = _Export(data)
            return Memory(export.address, export.nbytes, export.readonly, export, _anchor(data.obj))
    elif _is_tensor(data) and _is_dense(data):
        check_memory("the tensor", data)
        nbytes = data.numel() * data.element_size()
        stager = None if data.device.type == "cpu" else Stager(data)
        return Memory(data.data_ptr(), nbytes, False, data, _anchor(data.untyped_storage()), stager)
    raise ValueError(
        f"RDMABuffer only supports contiguous torch.Tensor or c-contiguous memoryview. Got: {_describe(data)}"
    )


def storage_of(memory: Memory) -> Any:
    """Return the torch storage that the memory lies in, or None. It may be freed or resized in place."""
    torch = sys.modules.get("torch")
    return memory.anchor if torch is not None and isinstance(memory.anchor, torch.UntypedStorage) else None


def extent_of(anchor: Any) -> tuple[int, int] | None:
    """Return address and bytes of all of the memory that an anchor of `Memory` stands for, or None."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(anchor, torch.UntypedStorage):
        return anchor.data_ptr(), anchor.nbytes()
    try:
        view = memoryview(anchor)
    except (TypeError, ValueError, BufferError):  # closed, for instance
        return None
    if not view.c_contiguous:
        return None
    export = _Export(view)
    return export.address, export.nbytes


def host_bytes(nbytes: int, near: Stager) -> Memory:
    """Return fresh host memory of ``nbytes`` to bounce through, page-locked if ``near`` is on a GPU."""
    return memory_of(near.pinned(nbytes))


def view_of(address: int, nbytes: int) -> memoryview:
    """Return a writable view of host memory, as bytes. It keeps nothing alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _is_tensor(data: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(data, torch.Tensor)


def _is_dense(tensor: Any) -> bool:
    strided = tensor.layout is sys.modules["torch"].strided
    return bool(strided and tensor.device.type != "meta" and tensor.is_contiguous())


def _anchor(owner: object) -> object | None:
    try:
        weakref.ref(owner)
    except TypeError:
        return None
    return owner


def _describe(data: Any) -> str:
    if isinstance(data, memoryview):
        return f"memoryview of shape {data.shape} and strides {data.strides}"
    if _is_tensor(data):
        tensor = cast(Any, data)
        strides = tensor.stride() if tensor.layout is sys.modules["torch"].strided else tensor.layout
        return f"tensor of shape {tuple(tensor.shape)}, strides {strides} on {tensor.device}"
    return type(data).__name__
