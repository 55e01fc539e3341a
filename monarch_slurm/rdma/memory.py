"""Where the bytes of a tensor or memoryview lie, and what keeps them there.

Memory of a GPU has no address that the CPU may touch: it is bounced through host memory by its `Stager`. Direct ways
(IPC handles on one host, dmabuf registration with an RDMA device) would be engines of their own, chosen by
`Memory.stager`'s device.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from dataclasses import dataclass
from typing import Any, Protocol, cast


class Stager(Protocol):
    """Copies between device memory and host memory; both calls return when the copy is complete."""

    def to_host(self, offset: int, address: int, nbytes: int) -> None:
        """Copy ``nbytes`` from ``offset`` in the device memory to the host ``address``."""

    def from_host(self, offset: int, address: int, nbytes: int) -> None:
        """Copy ``nbytes`` from the host ``address`` to ``offset`` in the device memory."""


@dataclass(frozen=True, eq=False)
class Memory:
    """A contiguous piece of memory of this process.

    Attributes:
        address: of the first byte; 0 when only the stager can reach it.
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


class _PyBuffer(ctypes.Structure):
    # struct Py_buffer of the C API; `obj` is untyped, since the reference in it belongs to PyBuffer_Release.
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


class _Export:
    """Holds a buffer export, so that its owner can neither move nor free it (a bytearray cannot be resized)."""

    def __init__(self, data: memoryview) -> None:
        raw = _PyBuffer()
        ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(data), ctypes.byref(raw), 0)
        self.address = raw.buf or 0
        self.nbytes = int(raw.len)
        self.readonly = bool(raw.readonly)
        weakref.finalize(self, ctypes.pythonapi.PyBuffer_Release, ctypes.byref(raw)).atexit = False


def memory_of(data: Any) -> Memory:
    """Return where ``data`` lies.

    Raises:
        ValueError: it is neither a contiguous tensor nor a C-contiguous memoryview.
    """
    if isinstance(data, memoryview):
        if data.c_contiguous:
            export = _Export(data)
            return Memory(export.address, export.nbytes, export.readonly, export, _anchor(data.obj))
    elif _is_tensor(data) and _is_dense(data):
        nbytes = data.numel() * data.element_size()
        if data.device.type == "cpu":
            return Memory(data.data_ptr(), nbytes, False, data, _anchor(data.untyped_storage()))
        return Memory(0, nbytes, False, data, None, _TensorStager(data))
    raise ValueError(
        f"RDMABuffer only supports contiguous torch.Tensor or c-contiguous memoryview. Got: {_describe(data)}"
    )


def host_bytes(nbytes: int, like: Stager | None = None) -> Memory:
    """Return fresh host memory of ``nbytes``, page-locked if ``like`` is a GPU's stager that can use that."""
    if isinstance(like, _TensorStager):
        return memory_of(like.pinned(nbytes))
    return memory_of(memoryview(bytearray(nbytes)))


def view_of(address: int, nbytes: int) -> memoryview:
    """Return a writable view of host memory, as bytes. It keeps nothing alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


class _TensorStager:
    def __init__(self, tensor: Any) -> None:
        self._torch = sys.modules["torch"]
        self._bytes = tensor.detach().reshape(-1).view(self._torch.uint8)

    def pinned(self, nbytes: int) -> Any:
        return self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=self._bytes.device.type == "cuda")

    def to_host(self, offset: int, address: int, nbytes: int) -> None:
        self._host(address, nbytes).copy_(self._bytes[offset : offset + nbytes])

    def from_host(self, offset: int, address: int, nbytes: int) -> None:
        self._bytes[offset : offset + nbytes].copy_(self._host(address, nbytes))
        if self._bytes.device.type == "cuda":
            self._torch.cuda.current_stream(self._bytes.device).synchronize()

    def _host(self, address: int, nbytes: int) -> Any:
        return self._torch.frombuffer(view_of(address, nbytes), dtype=self._torch.uint8)


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
