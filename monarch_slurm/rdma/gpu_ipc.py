"""Copies from and to GPU memory of other processes of this host: mapped once, then copied by the GPUs (NVLink, xGMI).

The owner sends what it takes to map the allocations behind a buffer over a Unix socket of the asking process; the
control plane carries the socket's name, and each end asks the kernel who the other is. A mapping stays until the last
buffer in its allocation is dropped. Dropped buffers are noticed as in `samehost`: by key, under the slot's lock.

Nothing orders a copy against work that the owner has given its GPU: it synchronizes before it tells others to read.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.gpu.sharing import (
    Allocation,
    allocations_of,
    device_bytes,
    exported,
    map_exported,
    receive_fds,
    send_fds,
)
from monarch_slurm.rdma.engine import Begun, Op, remaining
from monarch_slurm.rdma.errors import NoDirectWayError, PeerLostError, RDMAError, RDMATimeoutError
from monarch_slurm.rdma.memory import host_tensor
from monarch_slurm.rdma.registry import Entry, Registry
from monarch_slurm.rdma.samehost import NOW, SameHost

Fields = dict[str, Any]
Ask = Callable[[str, Fields, float], Fields]
Slot = tuple[int, int]
"""Slot and key of a buffer."""

_PEER_CREDENTIALS = struct.Struct("3i")
_BACKLOG = 128
"""Connections of others may fill the queue for a moment; they are closed one after the other."""
_SEND_SECONDS = 30.0


class _Piece(NamedTuple):
    """Part of a buffer: which allocation it lies in, where there, and how many bytes."""

    allocation: int
    offset: int
    nbytes: int


class GpuExports:
    """The owner's end: which allocations peers were told of, by number. For any thread.

    An allocation keeps its number until the last buffer in it is dropped; memory that comes to lie at its address later
    gets another, so that a peer never takes the one for the other.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._next = 0
        self._numbers: dict[Allocation, int] = {}
        self._users: dict[int, set[int]] = {}
        """By number: the keys of the buffers in the allocation."""
        self._told: dict[int, set[Any]] = {}
        """By number: who was told of it."""

    def send(self, home: Any, fields: Fields) -> Fields:
        """Answer a peer whose manager is ``home``: send what it does not know yet to its socket, say what lies where.

        Raises:
            BufferGoneError: a buffer was dropped.
            NoDirectWayError: the driver does not give the memory away.
        """
        known = set(fields["known"])
        answer = []
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(_SEND_SECONDS)
            sock.connect(f"\0{fields['socket']}")
            if not is_peer(sock, None):
                raise PeerLostError("the process that waits for GPU memory is another user's")
            for slot, key in fields["buffers"]:
                entry = self._registry.find(slot, key)
                with self._registry.using(entry):
                    answer.append([tuple(piece) for piece in self._send_one(sock, home, entry, known)])
        return {"pieces": answer}

    def _send_one(self, sock: socket.socket, home: Any, entry: Entry, known: set[int]) -> list[_Piece]:
        stager = entry.memory.stager
        if stager is None:
            raise NoDirectWayError(f"buffer {entry.slot} is memory of the host")
        start, nbytes = stager.bytes.data_ptr(), entry.memory.nbytes
        pieces = []
        try:
            for allocation in allocations_of(start, nbytes, max(0, stager.bytes.get_device())):
                number = self._number(allocation, entry.key, home)
                if number not in known:
                    with exported([allocation]) as (ipc, fds):
                        send_fds(sock, {"number": number, "ipc": ipc, "size_bytes": allocation.size_bytes}, fds)
                    known.add(number)
                first = max(start, allocation.address)
                end = min(start + nbytes, allocation.address + allocation.size_bytes)
                pieces.append(_Piece(number, first - allocation.address, end - first))
        except MonarchSlurmError as error:
            raise NoDirectWayError(f"the owner cannot give the memory of buffer {entry.slot} away: {error}") from None
        return pieces

    def _number(self, allocation: Allocation, key: int, home: Any) -> int:
        with self._lock:
            number = self._numbers.get(allocation)
            if number is None:
                self._next += 1
                number = self._numbers[allocation] = self._next
            self._users.setdefault(number, set()).add(key)
            self._told.setdefault(number, set()).add(home)
            return number

    def drop(self, entry: Entry) -> dict[Any, list[int]]:
        """Note that a buffer was dropped; return who must forget which allocations, since no buffer is left in them."""
        forget: dict[Any, list[int]] = {}
        with self._lock:
            for allocation, number in list(self._numbers.items()):
                keys = self._users[number]
                keys.discard(entry.key)
                if not keys:
                    del self._numbers[allocation], self._users[number]
                    for home in self._told.pop(number):
                        forget.setdefault(home, []).append(number)
        return forget


class GpuIpc:
    """Copies from and to GPU memory of one process of this host.

    Args:
        host: that process.
        pid: its pid.
        ask: asks its manager.
        spawn: runs a function on a thread.
        view: makes a uint8 tensor of mapped memory: mapping, its bytes, device.
    """

    name = "gpu_ipc"
    takes_devices = True

    def __init__(
        self,
        host: SameHost,
        pid: int,
        ask: Ask,
        spawn: Callable[[Callable[[], None]], None],
        view: Callable[[Any, int, int], Any] = device_bytes,
    ) -> None:
        self._host = host
        self._pid = pid
        self._ask = ask
        self._spawn = spawn
        self._view = view
        self._lock = threading.Lock()
        self._pieces: dict[Slot, list[_Piece]] = {}
        self._mapped: dict[tuple[int, int], Any] = {}
        """By allocation and device: the mapped memory as a tensor."""

    def transfer(self, ops: Sequence[Op], deadline: float) -> None:
        """See `Engine.transfer`."""
        devices = [_device_of(op) for op in ops]
        if not self._lock.acquire(timeout=remaining(deadline)):
            remaining(deadline)
        try:
            for device in set(devices):
                mine = [(op.target.slot, op.target.key) for op, its in zip(ops, devices, strict=True) if its == device]
                self._learn(mine, device.index or 0, deadline)
            with self._host.holding(ops, deadline):
                for device in set(devices):
                    with _current(device):
                        for op, its in zip(ops, devices, strict=True):
                            if its == device:
                                self._copy(op, device.index or 0)
        finally:
            self._lock.release()

    def begin(self, ops: Sequence[Op]) -> Begun | None:
        """Have the GPU make all copies of ``ops`` if nothing has to be waited for and all local memory is one GPU's.

        A thread takes longer to wake up, twice, than many a copy.
        """
        devices = {op.stager.bytes.device if op.stager is not None else None for op in ops}
        device = devices.pop()
        if devices or device is None or not self._lock.acquire(blocking=False):
            return None
        with ExitStack() as held:
            held.callback(self._lock.release)
            if any(self._is_unknown((op.target.slot, op.target.key), device.index or 0) for op in ops):
                return None
            try:
                held.enter_context(self._host.holding(ops, NOW))
            except RDMATimeoutError:
                return None

            def copy() -> None:
                for op in ops:
                    self._copy(op, device.index or 0)

            wait = _enqueued(device, copy)
            if wait is None:
                return None
            return Begun(wait, held.pop_all().close)

    def forget(self, allocations: Sequence[int]) -> None:
        """Unmap allocations whose buffers are all dropped. For any thread."""
        gone = set(allocations)
        with self._lock:
            for key in [key for key in self._mapped if key[0] in gone]:
                del self._mapped[key]
            for slot in [
                slot for slot, pieces in self._pieces.items() if gone & {piece.allocation for piece in pieces}
            ]:
                del self._pieces[slot]

    def lost(self, reason: str) -> None:
        """Nothing waits for the peer: copies end by themselves."""

    def close(self) -> None:
        """See `Engine.close`."""
        with self._lock:
            self._mapped.clear()
            self._pieces.clear()

    def _copy(self, op: Op, device: int) -> None:
        here = op.stager.bytes if op.stager is not None else host_tensor(op.address, op.nbytes)
        done = 0
        for piece in self._pieces[op.target.slot, op.target.key]:
            size = min(piece.nbytes, op.nbytes - done)
            if size <= 0:
                break
            there = self._mapped[piece.allocation, device][piece.offset : piece.offset + size]
            mine = here[done : done + size]
            (there if op.write else mine).copy_(mine if op.write else there, non_blocking=True)
            done += size

    def _is_unknown(self, buffer: Slot, device: int) -> bool:
        pieces = self._pieces.get(buffer)
        return pieces is None or any((piece.allocation, device) not in self._mapped for piece in pieces)

    def _learn(self, buffers: Sequence[Slot], device: int, deadline: float) -> None:
        wanted = list(dict.fromkeys(buffer for buffer in buffers if self._is_unknown(buffer, device)))
        if not wanted:
            return
        name = f"monarch_slurm.rdma {os.urandom(16).hex()}"
        failures: list[Exception] = []
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{name}")
            listener.listen(_BACKLOG)
            listener.settimeout(remaining(deadline))
            ended = threading.Event()

            def receive() -> None:
                try:
                    self._receive(listener, device, deadline)
                except Exception as error:  # told to whoever waits for the transfer
                    failures.append(error)
                finally:
                    ended.set()

            self._spawn(receive)
            known = [number for number, on in self._mapped if on == device]
            try:
                answer = self._ask("gpu_export", {"buffers": wanted, "known": known, "socket": name}, deadline)
            except BaseException:
                listener.shutdown(socket.SHUT_RDWR)  # nobody will connect any more
                ended.wait()
                raise
            ended.wait(remaining(deadline))
            if not ended.is_set():
                remaining(deadline)
        if failures:
            raise failures[0] if isinstance(failures[0], RDMAError) else NoDirectWayError(str(failures[0]))
        for buffer, pieces in zip(wanted, answer["pieces"], strict=True):
            self._pieces[buffer] = [_Piece(*piece) for piece in pieces]

    def _receive(self, listener: socket.socket, device: int, deadline: float) -> None:
        """Map all that the owner sends, until it hangs up."""
        while True:
            connection, _ = listener.accept()
            if is_peer(connection, self._pid):
                break
            connection.close()  # any process of this host may try
        with connection:
            connection.settimeout(remaining(deadline))
            while connection.recv(1, socket.MSG_PEEK):
                message, fds = receive_fds(connection)
                try:
                    size = message["size_bytes"]
                    mapping = map_exported(device, message["ipc"], fds, [size])
                    self._mapped[message["number"], device] = self._view(mapping, size, device)
                finally:
                    for fd in fds:
                        os.close(fd)


@contextmanager
def _current(device: Any) -> Iterator[None]:
    """Have a device current while the block runs (to change to it for each call takes long), then wait for its work."""
    if device.type != "cuda":
        yield
        return
    cuda = sys.modules["torch"].cuda
    with cuda.device(device):
        yield
        cuda.current_stream().synchronize()


def _enqueued(device: Any, copy: Callable[[], None]) -> Callable[[], object] | None:
    """Call ``copy`` on the device's default stream, where a thread of its own would; return what waits for it.

    None while the calling thread captures a graph: the copy would become part of it, or break it.
    """
    if device.type != "cuda":
        copy()
        return lambda: None
    cuda = sys.modules["torch"].cuda
    if cuda.is_current_stream_capturing():
        return None
    default = cuda.default_stream(device)
    if cuda.current_device() == device.index and cuda.current_stream() == default:
        copy()  # to change to where one is takes as long as all the rest
    else:
        with cuda.device(device), cuda.stream(default):
            copy()
    wait: Callable[[], object] = default.record_event().synchronize
    return wait


def _device_of(op: Op) -> Any:
    """Return the device that makes the copy: the local memory's, for host memory the one that this process uses."""
    if op.stager is not None:
        return op.stager.bytes.device
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        # A GPU taken only for this would cost seconds, and memory for good.
        error = NoDirectWayError("this process uses no GPU")
        error.lasting = False
        raise error
    return torch.device("cuda", torch.cuda.current_device())


def is_peer(sock: socket.socket, pid: int | None) -> bool:
    """Return whether the other end of a Unix socket is a process of this user, and ``pid`` if that is given."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    there, uid, _ = _PEER_CREDENTIALS.unpack(credentials)
    return uid == os.getuid() and pid in (None, there)
