"""Copies between processes of one host: by the kernel (``process_vm_readv``), or through memory that both have mapped.

Nothing is registered and the owner does nothing: its memory is reached where it lies. Memory made by `shared_memory` is
mapped by the peer, once, and then copied at the speed of memory; any other memory is copied by the kernel, page by
page, which is slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from monarch_slurm.rdma.engine import Begun, Op, remaining
from monarch_slurm.rdma.errors import BufferGoneError, PeerLostError, RDMAError, RDMATimeoutError
from monarch_slurm.rdma.registry import NONCE_BYTES, gone_text
from monarch_slurm.rdma.slot_locks import SlotLocks

_PIECE = 16 * 2**20
"""Bytes between two looks at the clock, and of one thread's share."""
_SMALL = 2**20
"""Up to this, copies go to the kernel many at a time."""
INLINE_BYTES = 256 * 1024
"""Up to this, a copy takes less time than another thread takes to wake up."""
NOW = 0.0
"""A deadline that allows no waiting."""
_IOV_MAX = 512
_PR_SET_PTRACER = 0x59616D61
_PTRACER_ANY = ctypes.c_ulong(-1)

_libc = ctypes.CDLL(None, use_errno=True)
_readv, _writev = _libc.process_vm_readv, _libc.process_vm_writev
for _call in (_readv, _writev):
    _call.restype = ctypes.c_ssize_t
    _pointer, _count = ctypes.c_void_p, ctypes.c_ulong
    _call.argtypes = [ctypes.c_int, _pointer, _count, _pointer, _count, _count]

Piece = tuple[int, int, int]
"""Local address, address in the owner, bytes."""


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def allow_peers() -> None:
    """Let processes of this user reach this one's memory where Yama's ptrace_scope is 1. No effect elsewhere."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    with contextlib.suppress(OSError, ValueError):
        if int(scope.read_text()) == 1:
            _libc.prctl(_PR_SET_PTRACER, _PTRACER_ANY, 0, 0, 0)


def network_id() -> str:
    """Return a text that only processes share that see the same loopback interface."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


class SharedMemory:
    """Memory with a file behind it, which a peer on this host can map. See `shared_memory`."""

    live: dict[int, tuple[mmap.mmap, int]] = {}  # noqa: RUF012 - one table for the process
    """Address: mapping and descriptor. Kept: other memory must never come to lie at an address that is listed."""

    @classmethod
    def find(cls, address: int, nbytes: int) -> tuple[int, int, int] | None:
        """Return descriptor, offset and size of the mapping that holds the bytes, or None."""
        for base, (mapping, fd) in list(cls.live.items()):
            size = len(mapping)
            if base <= address and address + nbytes <= base + size:
                return fd, address - base, size
        return None


def shared_memory(nbytes: int) -> memoryview:
    """Return zeroed memory that processes of this host copy from and to at full speed, as bytes.

    ``torch.frombuffer(shared_memory(n), dtype=...)`` makes a tensor of it. It stays until the process ends,
    used or not: make it once, and use it again.

    Args:
        nbytes: length in bytes, at least 1.

    Raises:
        ValueError: ``nbytes`` is less than 1.
        MemoryError: there is no room for it.
    """
    if nbytes < 1:
        raise ValueError(f"cannot make {nbytes} bytes of shared memory")
    fd = os.memfd_create("monarch_slurm.rdma", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        mapping = mmap.mmap(fd, nbytes)
    except OSError as error:
        os.close(fd)
        raise MemoryError(f"cannot make {nbytes} bytes of shared memory: {error.strerror}") from None
    view = memoryview(mapping)
    SharedMemory.live[ctypes.addressof(ctypes.c_char.from_buffer(mapping))] = mapping, fd
    return view


_pool = ThreadPoolExecutor(max_workers=max(1, min(4, len(os.sched_getaffinity(0)))), thread_name_prefix="rdma-copy")


def copy_pieces(copy: Callable[[Piece], object], pieces: Sequence[Piece], deadline: float) -> None:
    """Run ``copy`` on all ``pieces``, the large ones cut and spread over threads."""
    cut = [
        (here + start, there + start, min(_PIECE, nbytes - start))
        for here, there, nbytes in pieces
        for start in range(0, nbytes, _PIECE)
    ]
    if len(cut) == 1 or sum(piece[2] for piece in cut) <= _PIECE:
        for piece in cut:
            copy(piece)
        return

    def timed(piece: Piece) -> None:
        remaining(deadline)
        copy(piece)

    running = [_pool.submit(timed, piece) for piece in cut]
    errors = [error for future in running if (error := future.exception()) is not None]
    if errors:
        raise errors[0]


def _inline(transfer: Callable[[Sequence[Op], float], None], ops: Sequence[Op]) -> Begun | None:
    if sum(op.nbytes for op in ops) > INLINE_BYTES:
        return None
    try:
        transfer(ops, NOW)
    except RDMATimeoutError:
        return None
    return Begun(None, lambda: None)


class SameHost:
    """Copies from and to one process of this host.

    Args:
        pid: of the owner, in this PID namespace.
        nonce_address: where in the owner its ``nonce`` lies; it tells that ``pid`` is still the same process.
        lock_fd: descriptor of the owner's lock file, in the owner.

    Raises:
        OSError: this process may not reach that one.
    """

    name = "process_vm"
    takes_devices = False

    def __init__(self, pid: int, nonce_address: int, nonce: bytes, lock_fd: int) -> None:
        self._pid = pid
        self._nonce_address, self._nonce = nonce_address, nonce
        self._mapped: dict[int, mmap.mmap] = {}
        self._lock = threading.Lock()
        self._check([])
        self._slots = SlotLocks(os.open(f"/proc/{pid}/fd/{lock_fd}", os.O_RDWR | os.O_CLOEXEC))

    def transfer(self, ops: Sequence[Op], deadline: float) -> None:
        """See `Engine.transfer`."""
        with self.holding(ops, deadline):
            for write in (False, True):
                call = _writev if write else _readv
                batch = [(op.address, op.target.address + op.offset, op.nbytes) for op in ops if op.write is write]
                small = [piece for piece in batch if piece[2] <= _SMALL]
                for start in range(0, len(small), _IOV_MAX):
                    if start:
                        remaining(deadline)
                    self._move(call, small[start : start + _IOV_MAX])
                large = [piece for piece in batch if piece[2] > _SMALL]
                copy_pieces(lambda piece, call=call: self._move(call, [piece]), large, deadline)  # type: ignore[misc]

    def begin(self, ops: Sequence[Op]) -> Begun | None:
        """Do all ``ops`` on the calling thread if they are small and nothing has to be waited for."""
        return _inline(self.transfer, ops)

    def transfer_mapped(self, ops: Sequence[Op], deadline: float) -> None:
        """Copy ``ops`` whose targets have a mapping."""
        with self.holding(ops, deadline):
            pieces = []
            for op in ops:
                assert op.target.mapping is not None
                fd, offset, size = op.target.mapping
                there = self._base(fd, size) + offset + op.offset
                pieces.append((there, op.address, op.nbytes) if op.write else (op.address, there, op.nbytes))
            copy_pieces(lambda piece: ctypes.memmove(*piece), pieces, deadline)

    def lost(self, reason: str) -> None:
        """Nothing waits for the peer: the kernel tells at once."""

    def close(self) -> None:
        """See `Engine.close`."""
        self._slots.close()
        with self._lock:
            self._mapped.clear()

    @contextlib.contextmanager
    def holding(self, ops: Sequence[Op], deadline: float) -> Iterator[None]:
        """Hold off the drop of the buffers of ``ops`` while the block runs.

        Raises:
            BufferGoneError: one is dropped.
            PeerLostError: the process has ended.
        """
        slots = self._slots.take([op.target.slot for op in ops], deadline)
        try:
            self._check(ops)
            yield
        finally:
            self._slots.give(slots)

    def _check(self, ops: Sequence[Op]) -> None:
        """Make sure that the process is the same, and that the buffers are there."""
        nonce = (ctypes.c_char * NONCE_BYTES)()
        keys = (ctypes.c_uint64 * max(1, len(ops)))()
        first = ctypes.addressof(keys)
        pieces = [(ctypes.addressof(nonce), self._nonce_address, NONCE_BYTES)]
        pieces += [(first + 8 * index, op.target.slot_address, 8) for index, op in enumerate(ops)]
        for start in range(0, len(pieces), _IOV_MAX):
            self._move(_readv, pieces[start : start + _IOV_MAX])
        if nonce.raw != self._nonce:
            raise self._dead()
        for op, key in zip(ops, keys, strict=False):
            if key != op.target.key:
                raise BufferGoneError(gone_text(op.target.slot))

    def _move(self, call: Callable[..., int], pieces: Sequence[Piece]) -> None:
        here, there = (_IoVec * len(pieces))(), (_IoVec * len(pieces))()
        for index, (local, remote, nbytes) in enumerate(pieces):
            here[index].base, there[index].base = local, remote
            here[index].length = there[index].length = nbytes
        total = sum(piece[2] for piece in pieces)
        moved = call(self._pid, ctypes.addressof(here), len(pieces), ctypes.addressof(there), len(pieces), 0)
        if moved == total:
            return
        code = ctypes.get_errno() if moved < 0 else errno.EFAULT
        if code == errno.ESRCH or not os.path.exists(f"/proc/{self._pid}"):
            raise self._dead()
        if code == errno.EFAULT:
            raise BufferGoneError(
                f"the owner's memory is not there any more (process {self._pid}): was it freed or resized?"
            )
        if code in (errno.EPERM, errno.ENOSYS):
            raise PermissionError(code, os.strerror(code))
        raise RDMAError(f"copying from or to process {self._pid} failed: {os.strerror(code)}")

    def _base(self, fd: int, size: int) -> int:
        with self._lock:
            if fd not in self._mapped:
                try:
                    ours = os.open(f"/proc/{self._pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
                except OSError:
                    raise self._dead() from None
                try:
                    self._mapped[fd] = mmap.mmap(ours, size)
                finally:
                    os.close(ours)
            return ctypes.addressof(ctypes.c_char.from_buffer(self._mapped[fd]))

    def _dead(self) -> PeerLostError:
        return PeerLostError(f"the owner of the buffer, process {self._pid} of this host, has ended")


class SameHostMapped:
    """The same process as a `SameHost`, for buffers whose memory can be mapped."""

    name = "shm"
    takes_devices = False

    def __init__(self, host: SameHost) -> None:
        self._host = host

    def transfer(self, ops: Sequence[Op], deadline: float) -> None:
        """See `Engine.transfer`."""
        self._host.transfer_mapped(ops, deadline)

    def begin(self, ops: Sequence[Op]) -> Begun | None:
        """See `SameHost.begin`."""
        return _inline(self.transfer, ops)

    def lost(self, reason: str) -> None:
        """Nothing waits for the peer."""

    def close(self) -> None:
        """The `SameHost` holds everything."""
