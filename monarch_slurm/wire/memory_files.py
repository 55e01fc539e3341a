"""Files of memory (memfd_create(2)) that large buffers are sent in, and a pool of them to be used again.

New memory costs more than a copy, so a process keeps the files that it has sent. What is sent is the file opened once
more, with a shared lock (flock(2)). That lock is the kernel's account of who still reads: it disappears with the last
descriptor and the last map of what was sent, wherever they are and however their process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from monarch_slurm.py_buffer import PyBuffer, get_buffer, release_buffer

PAGE_BYTES = mmap.PAGESIZE

KEPT_BYTES = 256 * 2**20
"""Memory of files that a process keeps for as long as it lives."""

KEEP_SECONDS = 10.0
"""How long a process keeps more than that after it was last used, up to a tenth of its memory."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MUCH_TOO_LARGE = 4
"""A file of so many times the bytes that are wanted is not taken for them."""

_SMALLEST_FILE = 2**20

_SHORT_COPY_BYTES = 512 * 1024
"""What is copied faster than other threads would get the interpreter meanwhile."""

_libc = ctypes.CDLL(None, use_errno=True)  # releases the interpreter while it copies
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memcpy.restype = ctypes.c_void_p
_FAILED = ctypes.c_void_p(-1).value

MAP_FIXED, MAP_NORESERVE, _MAP_POPULATE = 0x10, 0x4000, 0x8000


@contextlib.contextmanager
def address_of(data: bytes | bytearray | memoryview) -> Iterator[int]:
    """Give the address of contiguous bytes, which stay there inside of the ``with``."""
    info = PyBuffer()
    get_buffer(data, ctypes.byref(info), 0)
    try:
        yield info.buf or 0
    finally:
        release_buffer(ctypes.byref(info))


def copy_memory(to: int, source: int, size: int) -> None:
    """Copy ``size`` bytes between addresses; other threads run meanwhile."""
    _libc.memcpy(to, source, size)


def read_memory(fd: int, at: int, to: int, size: int) -> None:
    """Read ``size`` bytes of a file from ``at`` on to the address ``to``; other threads run meanwhile.

    Raises:
        OSError: the file is shorter.
    """
    view = memoryview((ctypes.c_char * size).from_address(to)).cast("B")
    while view:
        count = os.preadv(fd, [view], at)
        if not count:
            raise OSError(f"a file of memory ends {len(view)} bytes too early")
        at, view = at + count, view[count:]


def map_file(fd: int, size: int, flags: int, offset: int = 0, address: int | None = None) -> int:
    """Return the address at which bytes of a file are mapped, to be read and written.

    Args:
        flags: of mmap(2).
        offset: a multiple of `PAGE_BYTES`.

    Raises:
        OSError: the kernel cannot map them.
    """
    found: int = _libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
    if found == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def map_to_read(fd: int, size: int) -> int:
    """Return the address at which a file is mapped that is only read, all of whose pages are entered at once.

    Raises:
        OSError: the kernel cannot map it.
    """
    found: int = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_POPULATE, fd, 0)
    if found == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def view_of(address: int, size: int, skip: int = 0) -> memoryview:
    """Return the mapped bytes from ``address + skip`` on; when nothing refers to them any more, they are unmapped.

    Args:
        size: of the whole map.
    """
    mapped = (ctypes.c_char * (size - skip)).from_address(address + skip)
    # At the end of the process the kernel unmaps; a thread may still look at it then.
    weakref.finalize(mapped, _libc.munmap, address, size).atexit = False
    return memoryview(mapped).cast("B")


def own_memory() -> int:
    """Return how many bytes of memory this process may use, by the machine and its control group."""
    found = os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root, name = ("/sys/fs/cgroup", "memory.max") if not controllers else (None, "")
            if "memory" in controllers.split(","):
                root, name = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
            for folder in (Path(path), *Path(path).parents) if root else ():
                with contextlib.suppress(OSError, ValueError):
                    found = min(found, int(Path(f"{root}{folder}", name).read_text()))
    return found


class MemoryFile:
    """A file of memory that this process writes, and others read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used_at = 0.0
        self.fd = os.memfd_create("monarch_slurm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._view: memoryview | None = None
        self._address = 0
        self.fresh = True
        """Whether it has never been sent."""
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
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

    def write(self, at: int, data: memoryview) -> None:
        """Write bytes from ``at`` on. Other threads run meanwhile.

        Raises:
            OSError: there is no memory.
        """
        view = self._mapped()
        if view is not None:
            if len(data) <= _SHORT_COPY_BYTES:
                view[at : at + len(data)] = data
                return
            with address_of(data) as source:
                copy_memory(self._address + at, source, len(data))
            return
        while len(data):  # memory that is not there yet is written faster than mapped
            count = os.pwrite(self.fd, data, at)
            at, data = at + count, data[count:]

    def room(self, at: int, size: int) -> memoryview | None:
        """Return bytes of the file, to be written to; None if `write` is the faster way.

        Raises:
            OSError: the kernel cannot map them.
        """
        view = self._mapped()
        return None if view is None else view[at : at + size]

    def _mapped(self) -> memoryview | None:
        if not self.fresh and self._view is None:
            self._address = map_file(self.fd, self.size, mmap.MAP_SHARED)
            self._view = view_of(self._address, self.size)
        return self._view

    def open_again(self) -> int:
        """Return a descriptor to be sent, which keeps this from being `is_free`."""
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_SH)
        self.fresh = False
        return fd

    def close(self) -> None:
        """Keep it no longer; what was sent stays."""
        self._view = None
        os.close(self.fd)


class MemoryPool:
    """Files that this process has sent buffers in; those used last come last. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.files: list[MemoryFile] = []
        self._most = 0
        self._timer: threading.Timer | None = None

    def take(self, size: int) -> MemoryFile:
        """Return a file of at least ``size`` bytes that nobody else uses, to be given back with `keep`.

        Raises:
            OSError: this process may open no more files, or there is no memory.
        """
        with self._lock:
            fitting = [file for file in self.files if size <= file.size < _MUCH_TOO_LARGE * size and file.is_free()]
            if fitting:
                file = min(fitting, key=lambda file: file.size)
                self.files.remove(file)
                return file
        return MemoryFile(max(_SMALLEST_FILE, 1 << (size - 1).bit_length()))

    def keep(self, file: MemoryFile) -> None:
        """Have a file used again, once nobody reads it."""
        file.used_at = time.monotonic()
        with self._lock:
            self.files.append(file)
            if self._size() > KEPT_BYTES:
                self._most = self._most or max(KEPT_BYTES, own_memory() // 10)
                self._limit(self._most)
                if self._timer is None:
                    self._look_later()

    def _size(self) -> int:
        return sum(file.size for file in self.files)

    def _limit(self, most: int, before: float = float("inf")) -> None:
        while self._size() > most and self.files[0].used_at < before:
            self.files.pop(0).close()

    def _look_later(self) -> None:
        self._timer = threading.Timer(KEEP_SECONDS / 2, self._look)
        self._timer.daemon = True
        self._timer.start()

    def _look(self) -> None:
        with self._lock:
            self._timer = None
            self._limit(KEPT_BYTES, time.monotonic() - KEEP_SECONDS)
            if self._size() > KEPT_BYTES:
                self._look_later()


_pool = MemoryPool()


def pool() -> MemoryPool:
    """Return the files of this process."""
    return _pool


def _forget_pool() -> None:
    global _pool
    for file in _pool.files:  # they are the parent's, who may fill them again at any time
        file.close()
    _pool = MemoryPool()


os.register_at_fork(after_in_child=_forget_pool)
