"""Large buffers in files of memory (memfd_create(2)), which the processes of a machine hand on without copying them.

Whoever sends a buffer copies it into such a file. Its descriptor goes along with the message; whoever gets that, and
passes it on, touches none of the bytes. The last one maps the file for itself: the kernel copies the pages that it
writes to, and no others.

New memory costs more than a copy, so files are used again (`_Pool`). What is sent is the file opened once more, with a
shared lock (flock(2)). That lock is the kernel's account of who still reads: it is gone with the last descriptor and
the last map of what was sent, wherever they are and however their process ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
import threading
import weakref

BULK_BYTES = 2**20
"""Buffers of this size and more travel so between the processes of a machine."""

MAX_BULKS = 200
"""Files that go along with one message; the kernel takes 253."""

PlainBuffer = bytes | bytearray | memoryview

MAX_POOL_BYTES = 256 * 2**20
"""Memory of files that a process keeps to use again."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MUCH_TOO_LARGE = 4
"""A file of so many times the bytes that are wanted is not taken for them."""

_POPULATE_READ = 22

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value


class Bulk:
    """The bytes of one buffer, in a file of memory that does not change while this object lives, or a view of it.

    Args:
        fd: of the file; owned from here on.
        size: in bytes.
    """

    __slots__ = ("__weakref__", "_size", "fd")

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self._size = size

    @staticmethod
    def of(data: PlainBuffer) -> Bulk:
        """Return a copy of ``data``.

        Raises:
            OSError: this process may open no more files, or there is no memory.
        """
        return _pool.copy(memoryview(data).cast("B"))

    def __len__(self) -> int:
        return self._size

    def is_whole(self) -> bool:
        """Return whether the file has as many bytes as it should, and can never have fewer."""
        try:
            sealed = fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        except OSError:  # it is no file of memory
            return False
        return sealed and os.fstat(self.fd).st_size >= self._size

    def view(self) -> memoryview:
        """Return the bytes, mapped. What is written to them is seen by nobody else.

        Raises:
            MemoryError: the kernel has no room for another map.
        """
        try:
            return _map(self.fd, self._size, mmap.MAP_PRIVATE)
        except OSError as error:
            raise MemoryError(f"cannot map {self._size} bytes: {error.strerror}") from None

    def __del__(self) -> None:
        os.close(self.fd)


class Handed(Bulk):
    """No bytes, but a connected socket that one process of a machine hands to another; alone in the body of a message.

    Args:
        fd: of the socket; owned from here on.
    """

    __slots__ = ()

    def __init__(self, fd: int) -> None:
        super().__init__(fd, BULK_BYTES)  # so that it goes along as a file does

    def is_whole(self) -> bool:
        """Return whether it is a socket."""
        return stat.S_ISSOCK(os.fstat(self.fd).st_mode)

    def view(self) -> memoryview:
        """Raise: there is nothing to read.

        Raises:
            TypeError: always.
        """
        raise TypeError("a socket was handed on, and has no bytes")


def taken(fd: int, size: int) -> Bulk:
    """Return what came along as the descriptor ``fd``, and stands for ``size`` bytes."""
    return Handed(fd) if stat.S_ISSOCK(os.fstat(fd).st_mode) and size == BULK_BYTES else Bulk(fd, size)


class _File:
    """A file of the pool."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd = os.memfd_create("monarch_slurm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._view: memoryview | None = None
        self._written = False
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            self.close()
            raise

    def is_free(self) -> bool:
        """Return whether nobody reads any more what was sent of it."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        return True

    def fill(self, data: memoryview) -> Bulk:
        """Write ``data`` into it, and return that."""
        if self._written and self._view is None:
            self._view = _map(self.fd, self.size, mmap.MAP_SHARED)
        if self._view is not None:
            self._view[: len(data)] = data
        else:  # memory that is not there yet is quicker written than mapped
            self._written = True
            at = 0
            while at < len(data):
                at += os.pwrite(self.fd, data[at:], at)
        bulk = Bulk(os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC), len(data))
        fcntl.flock(bulk.fd, fcntl.LOCK_SH)
        return bulk

    def close(self) -> None:
        """Keep it no longer; what was sent stays."""
        self._view = None
        os.close(self.fd)


class _Pool:
    """Files that this process has sent buffers in, to be used again; those used last come last. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: list[_File] = []

    def copy(self, data: memoryview) -> Bulk:
        """Return a copy of ``data``."""
        with self._lock:
            file = self._take(len(data))
            try:
                return file.fill(data)
            finally:
                self._keep(file)

    def _take(self, size: int) -> _File:
        fitting = [file for file in self._files if size <= file.size < _MUCH_TOO_LARGE * size and file.is_free()]
        if not fitting:
            return _File(size)
        file = min(fitting, key=lambda file: file.size)
        self._files.remove(file)
        return file

    def _keep(self, file: _File) -> None:
        self._files.append(file)
        while sum(file.size for file in self._files) > MAX_POOL_BYTES:
            self._files.pop(0).close()


def _map(fd: int, size: int, how: int) -> memoryview:
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, how, fd, 0)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _libc.madvise(address, size, _POPULATE_READ)  # all at once; an older kernel refuses, and does it page by page
    mapped = (ctypes.c_char * size).from_address(address)
    # At the end of the process the kernel unmaps; a thread may still look at it then.
    weakref.finalize(mapped, _libc.munmap, address, size).atexit = False
    return memoryview(mapped).cast("B")


_pool = _Pool()


def _forget_pool() -> None:
    global _pool
    for file in _pool._files:  # they are the parent's, who may fill them again at any time
        file.close()
    _pool = _Pool()


os.register_at_fork(after_in_child=_forget_pool)


def in_bulk(frame: PlainBuffer | Bulk) -> PlainBuffer | Bulk:
    """Return ``frame``, as a file of memory if it is large."""
    if isinstance(frame, Bulk) or len(frame) < BULK_BYTES:
        return frame
    try:
        return Bulk.of(frame)
    except OSError:  # this process has no descriptor left for it
        return frame


def in_place(frame: PlainBuffer | Bulk) -> PlainBuffer:
    """Return ``frame`` as bytes that can be read here."""
    return frame.view() if isinstance(frame, Bulk) else frame
