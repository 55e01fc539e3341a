"""Large bytes, bytearrays and texts of CPython, made with their bytes in mapped files where that is possible.

glibc gives every large object pages of its own by mmap(2), and takes them away by munmap(2). So whole pages of a file
can be mapped in their place: a private map is memory like any other, and ends with the object. Where an allocator works
otherwise, or the bytes are not at the same place in a page, they are copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from typing import Any, Protocol

from monarch_slurm.wire.memory_files import PAGE_BYTES

_CHUNK_HEADER = 16
"""Bytes that glibc keeps before memory: the size of what is before that, and its own size with three flags."""

_MMAPPED = 2
_HUGE_PAGE_BYTES = 2 * 2**20
_MADV_HUGEPAGE = 14

_BYTES_HEADER = sys.getsizeof(b"") - 1
_TEXT_HEADER = sys.getsizeof("") - 1

BYTES_PHASE = _CHUNK_HEADER + _BYTES_HEADER
BYTEARRAY_PHASE = _CHUNK_HEADER
TEXT_PHASE = _CHUNK_HEADER + _TEXT_HEADER
"""Where in a page the bytes of a large object begin, with glibc."""


def _python(name: str, result: Any, *arguments: Any) -> Any:
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_new_bytes = _python("PyBytes_FromStringAndSize", ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)
_new_bytearray = _python("PyByteArray_FromStringAndSize", ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)
_memory_of_bytearray = _python("PyByteArray_AsString", ctypes.c_void_p, ctypes.py_object)
_new_text = _python("PyUnicode_New", ctypes.py_object, ctypes.c_ssize_t, ctypes.c_uint32)
_libc = ctypes.CDLL(None)


def _is_glibc() -> bool:
    """Return whether large objects come from glibc's malloc."""
    try:
        glibc = ctypes.CDLL("libc.so.6")
        mine, real = (ctypes.cast(library.malloc, ctypes.c_void_p).value for library in (_libc, glibc))
        _ = glibc.gnu_get_libc_version
    except (OSError, AttributeError):
        return False
    return mine == real and sys.implementation.name == "cpython" and getattr(sys, "_is_gil_enabled", lambda: True)()


_GLIBC = _is_glibc()


class Source(Protocol):
    """Where the bytes come from; see `monarch_slurm.wire.large_buffers.Incoming`."""

    def place(self, address: int, at: int, size: int) -> bool: ...  # noqa: D102
    def copy(self, address: int, at: int, size: int) -> None: ...  # noqa: D102


def make_bytes(source: Source, at: int, size: int) -> bytes:
    """Return ``size`` bytes of ``source`` from ``at`` on."""
    made: bytes = _new_bytes(None, size)
    _fill(id(made), id(made) + _BYTES_HEADER, source, at, size)
    return made


def make_bytearray(source: Source, at: int, size: int) -> bytearray:
    """Return ``size`` bytes of ``source`` from ``at`` on."""
    made: bytearray = _new_bytearray(None, size)
    memory = _memory_of_bytearray(made)
    _fill(memory, memory, source, at, size)
    return made


def make_ascii(source: Source, at: int, size: int) -> str:
    """Return ``size`` characters of ``source`` from ``at`` on, each of which is ASCII."""
    made: str = _new_text(size, 127)
    _fill(id(made), id(made) + _TEXT_HEADER, source, at, size)
    return made


def make_text(data: memoryview) -> str:
    """Return UTF-8 as a text."""
    return str(data, "utf-8", "surrogatepass")


def text_address(text: str) -> int:
    """Return the address of the characters of a text that has only ASCII ones."""
    return id(text) + _TEXT_HEADER


@contextlib.contextmanager
def characters_of(text: str) -> Iterator[memoryview]:
    """Give the characters of a text that has only ASCII ones, as long as it is referred to."""
    with memoryview((ctypes.c_char * len(text)).from_address(id(text) + _TEXT_HEADER)) as view:
        yield view.cast("B")


def _fill(memory: int, address: int, source: Source, at: int, size: int) -> None:
    """Fill a new object with the bytes of ``source``.

    Args:
        memory: address of what was allocated for it.
        address: of its bytes.
    """
    if _is_mapped(memory, address + size - memory):
        first, end = -(-address // PAGE_BYTES) * PAGE_BYTES, (address + size) // PAGE_BYTES * PAGE_BYTES
        inner = at + first - address
        if inner % PAGE_BYTES == 0 and first < end and source.place(first, inner, end - first):
            source.copy(address, at, first - address)
            source.copy(end, inner + end - first, address + size - end)
            return
    # New memory costs more than the copy: in huge pages it is made with fewer faults, whichever allocator it is of.
    start = -(-address // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    end = (address + size) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if start < end:
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_HUGEPAGE)
    source.copy(address, at, size)


def _is_mapped(memory: int, size: int) -> bool:
    """Return whether glibc has given pages of their own to ``size`` bytes at ``memory``."""
    if not _GLIBC or memory % PAGE_BYTES != _CHUNK_HEADER:
        return False
    before, word = (ctypes.c_size_t * 2).from_address(memory - _CHUNK_HEADER)
    chunk = word & ~7
    return (
        before == 0
        and word & 7 == _MMAPPED
        and chunk % PAGE_BYTES == 0
        and _CHUNK_HEADER + size <= chunk <= _CHUNK_HEADER + size + 2 * PAGE_BYTES
    )
