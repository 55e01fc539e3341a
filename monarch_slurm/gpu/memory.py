"""GPU memory that can be given away: to another process as a file descriptor or an IPC handle, to a NIC as a dmabuf.

A descriptor travels over a Unix socket (``SCM_RIGHTS``). Whoever can connect to the socket can map the memory: put it
in a private folder, or use a `socket.socketpair`.
"""

from __future__ import annotations

import array
import json
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.gpu.libraries import gpu_runtime, native

if TYPE_CHECKING:
    import torch

_MAX_MESSAGE_BYTES = 4096
_MAX_FDS = 64


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
        data: bytes = gpu_runtime().read(self.address + offset_bytes, size_bytes)
        return data

    def write(self, data: bytes, offset_bytes: int = 0) -> None:
        """Copy bytes to the device."""
        self._check_range(len(data), offset_bytes)
        gpu_runtime().write(self.address + offset_bytes, data)

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


def export_dmabuf(address: int, size_bytes: int) -> Dmabuf:
    """Export device memory as a dmabuf, such as a NIC can register.

    Args:
        address: any device address; it need not be aligned.
        size_bytes: size of the range.

    Raises:
        MonarchSlurmError: the runtime cannot export (too old, or the kernel lacks support).
    """
    return Dmabuf(*gpu_runtime().export_dmabuf(address, size_bytes))


def send_fds(sock: socket.socket, message: dict[str, Any], fds: list[int]) -> None:
    """Send a small message (JSON) and descriptors over a Unix stream socket; the sender keeps its own descriptors."""
    body = json.dumps(message).encode()
    if len(body) > _MAX_MESSAGE_BYTES or len(fds) > _MAX_FDS:
        raise ValueError(f"{len(body)} bytes and {len(fds)} descriptors; at most {_MAX_MESSAGE_BYTES} and {_MAX_FDS}")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())] if fds else []
    frame = len(body).to_bytes(4, "big") + body
    sent = sock.sendmsg([frame], rights)
    sock.sendall(frame[sent:])


def receive_fds(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive what `send_fds` sent; the descriptors are the receiver's to close.

    Raises:
        MonarchSlurmError: the peer closed the connection or sent something else.
    """
    size = array.array("i").itemsize
    head, ancillary, flags, _ = sock.recvmsg(4, socket.CMSG_SPACE(_MAX_FDS * size))
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) // size * size])
    try:
        head += _receive(sock, 4 - len(head))
        length = int.from_bytes(head, "big")
        if length > _MAX_MESSAGE_BYTES or flags & socket.MSG_CTRUNC:
            raise MonarchSlurmError("what came over the socket was not sent by send_fds")  # noqa: TRY301
        return json.loads(_receive(sock, length)), list(fds)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise MonarchSlurmError("the peer closed the connection in the middle of a message")
        data += part
    return data


def send_memory(sock: socket.socket, memory: GpuMemory) -> None:
    """Give a peer process the use of the memory; both see each other's writes, and it lives until both let go."""
    fd = memory.export_fd()
    try:
        send_fds(sock, {"kind": "memory", "size_bytes": memory.size_bytes}, [fd])
    finally:
        os.close(fd)


def receive_memory(sock: socket.socket, device: int = 0) -> GpuMemory:
    """Map the memory that `send_memory` sent, for ``device`` of this process.

    Raises:
        MonarchSlurmError: the peer is gone or sent something else; the driver refuses.
    """
    message, fds = receive_fds(sock)
    try:
        if message.get("kind") != "memory" or len(fds) != 1:
            raise MonarchSlurmError(
                f"a memory was expected, but {message.get('kind')!r} came with {len(fds)} descriptors"
            )
        return GpuMemory(native().Mapping.import_fd(gpu_runtime(), device, fds[0], message["size_bytes"]))
    finally:
        for fd in fds:
            os.close(fd)


def send_tensor(sock: socket.socket, tensor: torch.Tensor) -> None:
    """Give a peer process a GPU tensor without copying it. Keep the tensor until the peer has let go of it.

    Memory of the plain allocator goes as an IPC handle, memory of one mapped allocation as a descriptor.

    Raises:
        ValueError: the tensor is not on a GPU or not contiguous.
        MonarchSlurmError: it spans several allocations (expandable segments of torch), or the driver refuses.
    """
    if not tensor.is_cuda or not tensor.is_contiguous():
        raise ValueError(
            f"a contiguous GPU tensor is needed, not one on {tensor.device} with strides {tensor.stride()}"
        )
    runtime = gpu_runtime()
    size_bytes = tensor.numel() * tensor.element_size()
    base, length_bytes = runtime.range_of(tensor.data_ptr())
    message = {
        "kind": "tensor",
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "offset_bytes": tensor.data_ptr() - base,
        "size_bytes": length_bytes,
    }
    if tensor.data_ptr() + size_bytes > base + length_bytes:
        raise MonarchSlurmError(
            f"the tensor's {size_bytes} bytes span several allocations; make it without expandable segments"
        )
    try:
        fd = runtime.export_allocation(base)
    except native().GpuError:  # plain memory: the driver knows no mapped allocation there
        send_fds(sock, {**message, "ipc": runtime.ipc_handle(base).hex()}, [])
        return
    try:
        send_fds(sock, message, [fd])
    finally:
        os.close(fd)


def receive_tensor(sock: socket.socket, device: int = 0) -> torch.Tensor:
    """Return the tensor that `send_tensor` sent, the same memory seen by ``device``; shape and dtype are the sender's.

    Raises:
        MonarchSlurmError: the peer is gone or sent something else; the driver refuses.
    """
    import torch

    message, fds = receive_fds(sock)
    try:
        if message.get("kind") != "tensor":
            raise MonarchSlurmError(f"a tensor was expected, but {message.get('kind')!r} came")
        if fds:
            mapping = native().Mapping.import_fd(gpu_runtime(), device, fds[0], message["size_bytes"])
        else:
            mapping = native().IpcMapping(gpu_runtime(), device, bytes.fromhex(message["ipc"]))
    finally:
        for fd in fds:
            os.close(fd)
    whole = torch.as_tensor(_Bytes(mapping, message["size_bytes"]), device=f"cuda:{device}")
    dtype = getattr(torch, message["dtype"])
    numel = 1
    for size in message["shape"]:
        numel *= size
    part = whole[message["offset_bytes"] :][: numel * dtype.itemsize]
    return part.view(dtype).view(message["shape"])


class _Bytes:
    """Bytes of a mapping as torch wants them; torch keeps this object, and with it the mapping, alive."""

    def __init__(self, mapping: Any, size_bytes: int) -> None:
        self._mapping = mapping
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (mapping.address, False),
            "version": 2,
        }
