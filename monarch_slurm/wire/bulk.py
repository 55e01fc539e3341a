"""Large buffers in files of memory (memfd_create(2)), which the processes of a machine hand on without copying them.

Whoever sends a buffer copies it into such a file. Its descriptor goes along with the message; whoever gets that, and
passes it on, touches none of the bytes. The last one maps the file for itself: the kernel copies the pages that it
writes to, and no others.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat

from monarch_slurm.wire.memory_files import SEALS, map_file, map_to_read, pool, view_of

BULK_BYTES = 2**20
"""Buffers of this size and more travel so between the processes of a machine."""

MAX_BULKS = 200
"""Files that go along with one message; the kernel takes 253."""

PlainBuffer = bytes | bytearray | memoryview


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
        view = memoryview(data).cast("B")
        files = pool()
        file = files.take(len(view))
        try:
            file.write(0, view)
            return Bulk(file.open_again(), len(view))
        finally:
            files.keep(file)

    def __len__(self) -> int:
        return self._size

    def is_whole(self) -> bool:
        """Return whether the file has as many bytes as it should, and can never have fewer."""
        try:
            sealed = fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & SEALS == SEALS
        except OSError:  # it is no file of memory
            return False
        return sealed and os.fstat(self.fd).st_size >= self._size

    def view(self) -> memoryview:
        """Return the bytes, mapped. What is written to them is seen by nobody else.

        Raises:
            MemoryError: the kernel has no room for another map.
        """
        try:
            return view_of(map_file(self.fd, self._size, mmap.MAP_PRIVATE), self._size)
        except OSError as error:
            raise MemoryError(f"cannot map {self._size} bytes: {error.strerror}") from None

    def view_to_read(self) -> memoryview:
        """Return the bytes, mapped to be read once from one end to the other.

        Raises:
            MemoryError: the kernel has no room for another map.
        """
        try:
            return view_of(map_to_read(self.fd, self._size), self._size)
        except OSError as error:
            raise MemoryError(f"cannot map {self._size} bytes: {error.strerror}") from None

    def __del__(self) -> None:
        os.close(self.fd)


class Late:
    """A frame whose bytes may still be on their way; see `monarch_slurm.wire.arriving`."""

    def __len__(self) -> int:
        raise NotImplementedError

    def whole(self) -> PlainBuffer | Bulk:
        """Wait, and return the frame itself."""
        raise NotImplementedError


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


def in_bulk(frame: PlainBuffer | Bulk | Late) -> PlainBuffer | Bulk:
    """Return ``frame``, as a file of memory if it is large."""
    if isinstance(frame, Late):
        frame = frame.whole()
    if isinstance(frame, Bulk) or len(frame) < BULK_BYTES:
        return frame
    try:
        return Bulk.of(frame)
    except OSError:  # this process has no descriptor left for it
        return frame


def in_place(frame: PlainBuffer | Bulk | Late) -> PlainBuffer:
    """Return ``frame`` as bytes that can be read here."""
    if isinstance(frame, (bytes, memoryview)):  # nearly all are
        return frame
    if isinstance(frame, Late):
        frame = frame.whole()
    return frame.view() if isinstance(frame, Bulk) else frame
