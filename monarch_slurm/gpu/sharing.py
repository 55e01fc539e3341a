"""GPU memory given to another process: descriptors and IPC handles over a Unix socket.

A descriptor travels as ``SCM_RIGHTS``. Whoever can connect to the socket can map the memory: put it in a private
folder, or use a `socket.socketpair`.

Memory of the plain allocator has an IPC handle. Mapped memory (`GpuMemory`, torch's expandable segments) has a
descriptor for each allocation; a tensor may span many, which the peer maps one behind the other.
"""

from __future__ import annotations

import array
import contextlib
import json
import math
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.gpu.libraries import gpu_runtime, native
from monarch_slurm.gpu.memory import GpuMemory
from monarch_slurm.tensor_memory import check_memory

if TYPE_CHECKING:
    import torch

_MAX_MESSAGE_BYTES = 1 << 20
_FDS_AT_ONCE = 64
_MAX_FDS = 1 << 16
_INT_BYTES = array.array("i").itemsize


@dataclass(frozen=True)
class Allocation:
    """A piece of device memory that the driver gives away as a whole.

    Args:
        address: of its first byte.
        size_bytes: its size.
        device: index of the device whose memory it is.
    """

    address: int
    size_bytes: int
    device: int = 0


def allocations_of(address: int, size_bytes: int, device: int = 0) -> list[Allocation]:
    """Return the allocations that hold a range of a device's memory, in the order of their addresses.

    Raises:
        MonarchSlurmError: part of the range is no memory of a device.
    """
    runtime = gpu_runtime()
    found = []
    at = address
    while at < address + size_bytes:
        base, size = runtime.range_of(device, at)
        found.append(Allocation(base, size, device))
        at = found[-1].address + found[-1].size_bytes
    return found


@contextlib.contextmanager
def exported(allocations: list[Allocation]) -> Iterator[tuple[str | None, list[int]]]:
    """Export allocations while the block runs: an IPC handle (in hex) of plain memory, or a descriptor of each.

    Raises:
        MonarchSlurmError: the driver refuses.
    """
    runtime = gpu_runtime()
    fds: list[int] = []
    try:
        try:
            fds += [runtime.export_allocation(each.device, each.address) for each in allocations]
        except native().GpuError:  # plain memory: the driver knows no mapped allocation there
            if len(allocations) > 1:
                raise
            yield runtime.ipc_handle(allocations[0].device, allocations[0].address).hex(), []
        else:
            yield None, fds
    finally:
        for fd in fds:
            os.close(fd)


def map_exported(device: int, ipc: str | None, fds: list[int], sizes_bytes: list[int]) -> Any:
    """Map what `exported` gave in another process, for ``device``; it stays until the returned object dies.

    The object has the ``address`` of the first byte. The descriptors stay the caller's.

    Raises:
        MonarchSlurmError: the driver refuses.
    """
    if ipc is not None:
        return native().IpcMapping(gpu_runtime(), device, bytes.fromhex(ipc))
    return native().Mapping.import_fds(gpu_runtime(), device, fds, sizes_bytes)


def device_bytes(mapping: Any, size_bytes: int, device: int) -> torch.Tensor:
    """Return mapped memory as a uint8 tensor of shape ``(size_bytes,)``, which keeps the mapping alive."""
    import torch

    return torch.as_tensor(_Bytes(mapping, size_bytes), device=f"cuda:{device}")


def send_fds(sock: socket.socket, message: dict[str, Any], fds: list[int]) -> None:
    """Send a message (JSON) and descriptors over a Unix stream socket; the sender keeps its own descriptors."""
    body = json.dumps([len(fds), message]).encode()
    if len(body) > _MAX_MESSAGE_BYTES or len(fds) > _MAX_FDS:
        raise ValueError(f"{len(body)} bytes and {len(fds)} descriptors; at most {_MAX_MESSAGE_BYTES} and {_MAX_FDS}")
    sock.sendall(len(body).to_bytes(4, "big") + body)
    for start in range(0, len(fds), _FDS_AT_ONCE):
        rights = array.array("i", fds[start : start + _FDS_AT_ONCE]).tobytes()
        sock.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def receive_fds(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive what `send_fds` sent; the descriptors are the receiver's to close.

    Raises:
        MonarchSlurmError: the peer closed the connection or sent something else.
    """
    length = int.from_bytes(_receive(sock, 4), "big")
    if length > _MAX_MESSAGE_BYTES:
        raise MonarchSlurmError("what came over the socket was not sent by send_fds")
    count, message = json.loads(_receive(sock, length))
    fds = array.array("i")
    try:
        while len(fds) < count:
            mark, ancillary, flags, _ = sock.recvmsg(1, socket.CMSG_SPACE(_FDS_AT_ONCE * _INT_BYTES))
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds.frombytes(data[: len(data) // _INT_BYTES * _INT_BYTES])
            if not mark or not ancillary or flags & socket.MSG_CTRUNC:
                raise MonarchSlurmError(  # noqa: TRY301
                    f"{len(fds)} of {count} descriptors came: the peer has closed the connection, or this process has "
                    "as many open files as it may (`ulimit -n`)"
                )
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return message, list(fds)


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
    with _received(sock, "memory") as (message, fds):
        return GpuMemory(map_exported(device, None, fds, [message["size_bytes"]]))


def send_tensor(sock: socket.socket, tensor: torch.Tensor) -> None:
    """Give a peer process a GPU tensor without copying it. Keep the tensor until the peer has let go of it.

    Raises:
        ValueError: the tensor is not on a GPU or not contiguous, has no elements, or has not its values in its memory.
        MonarchSlurmError: the driver refuses.
    """
    check_memory("the tensor", tensor)
    if not tensor.is_cuda or not tensor.is_contiguous() or tensor.numel() == 0:
        raise ValueError(
            f"a contiguous GPU tensor with elements is needed, not one of shape {tuple(tensor.shape)} on "
            f"{tensor.device} with strides {tensor.stride()}"
        )
    allocations = allocations_of(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor.get_device())
    message = {
        "kind": "tensor",
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "offset_bytes": tensor.data_ptr() - allocations[0].address,
        "sizes_bytes": [each.size_bytes for each in allocations],
    }
    with exported(allocations) as (ipc, fds):
        send_fds(sock, {**message, "ipc": ipc}, fds)


def receive_tensor(sock: socket.socket, device: int = 0) -> torch.Tensor:
    """Return the tensor that `send_tensor` sent, the same memory seen by ``device``; shape and dtype are the sender's.

    Raises:
        MonarchSlurmError: the peer is gone or sent something else; the driver refuses.
    """
    import torch

    with _received(sock, "tensor") as (message, fds):
        sizes = message["sizes_bytes"]
        whole = device_bytes(map_exported(device, message["ipc"], fds, sizes), sum(sizes), device)
    dtype = getattr(torch, message["dtype"])
    part = whole[message["offset_bytes"] :][: math.prod(message["shape"]) * dtype.itemsize]
    return part.view(dtype).view(message["shape"])


@contextlib.contextmanager
def _received(sock: socket.socket, kind: str) -> Iterator[tuple[dict[str, Any], list[int]]]:
    message, fds = receive_fds(sock)
    try:
        if message.get("kind") != kind:
            raise MonarchSlurmError(f"a {kind} was expected, but {message.get('kind')!r} came")
        yield message, fds
    finally:
        for fd in fds:
            os.close(fd)


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
