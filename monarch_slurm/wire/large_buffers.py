"""The large buffers of one value: how its sender puts them one behind the other, and how its receiver finds them.

The sender copies each once, into files of memory. The receiver maps its part of the files for itself, without a copy:
the kernel enters pages when they are read, and copies those that are written to. Large bytes, bytearrays and texts are
mapped into the objects themselves (`objects`).
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import pickle
import struct
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from monarch_slurm.wire import objects
from monarch_slurm.wire.bulk import BULK_BYTES, Bulk, Late, PlainBuffer, in_place
from monarch_slurm.wire.limits import LimitError
from monarch_slurm.wire.memory_files import (
    MAP_FIXED,
    MAP_NORESERVE,
    PAGE_BYTES,
    MemoryFile,
    address_of,
    copy_memory,
    map_file,
    pool,
    read_memory,
    view_of,
)
from monarch_slurm.wire.task_limits import start_thread

Buffer = PlainBuffer | Bulk | Late

SEGMENT_BYTES = 64 * 2**20
"""The largest file that is made; larger values take several."""

_ALIGN_BYTES = 64
_RUN_BYTES = 8 * 2**20
"""Smaller buffers that follow one another share a map of up to this size."""

_SHARED_COPY_BYTES = 16 * 2**20
"""From this size on two threads copy into a new object."""

_COUNT = struct.Struct("<I")
_KIND_SHIFT = 60
_SIZE_MASK = (1 << _KIND_SHIFT) - 1


class Kind(enum.IntEnum):
    """What the receiver makes of a buffer."""

    BUFFER = 0
    BYTES = 1
    BYTEARRAY = 2
    TEXT = 3
    """UTF-8."""
    ASCII = 4
    """A text, which the pickle refers to by its number."""
    STREAM = 5
    """The pickle itself; the last one."""


_PHASES = {
    Kind.BYTES: objects.BYTES_PHASE,
    Kind.BYTEARRAY: objects.BYTEARRAY_PHASE,
    Kind.ASCII: objects.TEXT_PHASE,
}
"""Where in a page the bytes of a large object begin."""


class Outgoing:
    """What a sender collects. `frames` or `discard` comes last."""

    def __init__(self) -> None:
        self.size = 0
        self._table: list[tuple[int, int, Kind]] = []
        self._small: bytearray | None = bytearray()
        """All of it, for as long as it is small."""
        self._segments: list[_Segment] = []

    def add(self, data: memoryview, kind: Kind) -> int:
        """Copy a contiguous buffer behind the others; return its number."""
        size = len(data)
        align, phase = _ALIGN_BYTES, 0
        if size >= BULK_BYTES:
            align, phase = PAGE_BYTES, _PHASES.get(kind, 0)
        at = self.size + (phase - self.size) % align
        if self._small is not None and at + size < BULK_BYTES:
            self._small += bytes(at - self.size)
            self._small += data
        else:
            if self._small is not None:
                small, self._small = self._small, None
                self._write(0, memoryview(small), size)
            self._write(at, data)
        self.size = at + size
        self._table.append((at, size, kind))
        return len(self._table) - 1

    def frames(self, stream: bytes) -> list[Buffer]:
        """Return the frames of a value: a head with the table and the pickle, and the buffers."""
        numbers = [number for at, size, kind in self._table for number in (at, size | kind << _KIND_SHIFT)]
        head = b"".join((_COUNT.pack(len(self._table)), struct.pack(f"<{len(numbers)}Q", *numbers), stream))
        if self._small is not None:
            return [head, bytes(self._small)]
        segments, self._segments = self._segments, []
        ends = [segment.start + segment.room for segment in segments[:-1]] + [self.size]
        frames: list[Buffer] = [head]
        for segment, end in zip(segments, ends, strict=True):
            frames.append(segment.sealed(end - segment.start))
        return frames

    def discard(self) -> None:
        """Give up what was collected."""
        for segment in self._segments:
            segment.close()
        self._segments.clear()

    def _write(self, at: int, data: memoryview, more: int = 0) -> None:
        while len(data):
            last = self._segments[-1] if self._segments else None
            end = last.start + last.room if last is not None else 0
            if last is None or at >= end:
                wanted = max(len(data) + more + at - end, self.size)
                self._segments.append(_Segment(end, min(max(wanted, BULK_BYTES), SEGMENT_BYTES)))
                continue
            count = min(len(data), end - at)
            last.write(at - last.start, data[:count])
            at, data = at + count, data[count:]


class _Segment:
    """One file, or plain memory where this process can have none.

    Args:
        start: where it begins among the buffers.
        size: the least that it has room for.
    """

    def __init__(self, start: int, size: int) -> None:
        self.start = start
        self._file: MemoryFile | None = None
        self._plain = bytearray()
        self.room = 1 << (size - 1).bit_length()
        with contextlib.suppress(OSError):
            self._file = pool().take(self.room)
            self.room = self._file.size
        if self._file is None:
            self._plain = bytearray(self.room)

    def write(self, at: int, data: memoryview) -> None:
        if self._file is not None:
            self._file.write(at, data)
            return
        with address_of(data) as source, address_of(self._plain) as to:
            copy_memory(to + at, source, len(data))

    def sealed(self, size: int) -> Buffer:
        """Return its frame; it takes nothing more."""
        if self._file is None:
            return bytes(memoryview(self._plain)[:size])
        try:
            return Bulk(self._file.open_again(), size)
        except OSError:  # no descriptor is left for it
            plain = bytearray(size)
            os.preadv(self._file.fd, [plain], 0)
            return plain
        finally:
            self.close()

    def close(self) -> None:
        if self._file is not None:
            pool().keep(self._file)
            self._file = None


class Incoming:
    """What a receiver has got.

    Args:
        frames: what `Outgoing.frames` returned, each of them in pieces or whole; but the first is whole.

    Raises:
        pickle.UnpicklingError: they are something else.
        LostPayloadError: some of it was still on its way when its connection ended.
    """

    def __init__(self, frames: Sequence[Buffer]) -> None:
        head = memoryview(in_place(frames[0])).cast("B")
        count = _COUNT.unpack_from(head)[0] if len(head) >= _COUNT.size else len(head)
        end = _COUNT.size + 16 * count
        if end > len(head):
            raise pickle.UnpicklingError(f"a head of {len(head)} bytes has no table of {count} buffers")
        numbers = iter(struct.unpack_from(f"<{2 * count}Q", head, _COUNT.size))
        self._frames = [frame.whole() if isinstance(frame, Late) else frame for frame in frames[1:] if len(frame)]
        self._starts = [0]
        for frame in self._frames:
            self._starts.append(self._starts[-1] + len(frame))
        total = self._starts[-1]
        self._table: list[tuple[int, int, int]] = []
        for at in numbers:
            number = next(numbers)
            size, kind = number & _SIZE_MASK, number >> _KIND_SHIFT
            if at + size > total or kind > Kind.STREAM:
                raise pickle.UnpicklingError(f"a buffer of {size} bytes at {at} is not among the {total} that came")
            self._table.append((at, size, kind))
        self._texts: dict[int, str] = {}
        self.has_texts = any(kind == Kind.ASCII for _, _, kind in self._table)
        self.stream = head[end:]
        """The pickle."""
        if self._table and self._table[-1][2] == Kind.STREAM:
            at, size, _ = self._table.pop()
            self.stream = self.region(at, size)

    def text(self, number: int) -> str:
        """Return an ASCII text.

        Raises:
            pickle.UnpicklingError: there is none of that number.
        """
        if number not in self._texts:
            if not 0 <= number < len(self._table) or self._table[number][2] != Kind.ASCII:
                raise pickle.UnpicklingError(f"there is no text {number}")
            at, size, _ = self._table[number]
            self._texts[number] = objects.make_ascii(self, at, size)
        return self._texts[number]

    def buffers(self) -> Iterator[object]:
        """Return what the table says, in its order; all of it writable, or as immutable as it was."""
        number = 0
        while number < len(self._table):
            at, size, kind = self._table[number]
            number += 1
            if kind == Kind.ASCII:
                continue
            if kind == Kind.BYTES:
                yield objects.make_bytes(self, at, size)
            elif kind == Kind.BYTEARRAY:
                yield objects.make_bytearray(self, at, size)
            elif kind == Kind.TEXT:
                yield objects.make_text(self.region(at, size))
            else:
                last = end = at + size
                count = 0
                while number + count < len(self._table) and size < BULK_BYTES:
                    next_at, next_size, next_kind = self._table[number + count]
                    if next_kind != Kind.BUFFER or next_at < last or next_at + next_size - at > _RUN_BYTES:
                        break
                    last = end = next_at + next_size
                    count += 1
                region = self.region(at, end - at)
                yield region[:size]
                for next_at, next_size, _ in self._table[number : number + count]:
                    yield region[next_at - at : next_at - at + next_size]
                number += count

    def region(self, at: int, size: int) -> memoryview:
        """Return bytes from ``at`` on in memory that nobody else writes to or reads.

        Raises:
            MemoryError: the kernel has no room for another map.
        """
        first = at - at % PAGE_BYTES
        whole = at + size - first
        if size and self._can_map(first, at + size):
            try:
                address = map_file(-1, whole, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
                view = view_of(address, whole, at - first)
                self._map(address, first, whole)
            except OSError as error:
                raise MemoryError(f"cannot map {size} bytes: {error.strerror}") from None
            return view
        plain = bytearray(size)
        with address_of(plain) as address:
            self.copy(address, at, size)
        return memoryview(plain)

    def place(self, address: int, at: int, size: int) -> bool:
        """Map whole pages over what is at ``address``; return whether that was possible. If not, it is as it was."""
        if not self._can_map(at, at + size):
            return False
        try:
            self._map(address, at, size)
        except OSError:
            with contextlib.suppress(OSError):
                map_file(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED, 0, address)
            return False
        return True

    def copy(self, address: int, at: int, size: int) -> None:
        """Copy bytes from ``at`` on to ``address``. Other threads run meanwhile."""
        half = size // 2 if size >= _SHARED_COPY_BYTES and (os.cpu_count() or 1) > 1 else 0
        errors: list[OSError] = []

        def copy_half() -> None:
            try:
                self._copy(address, at, half)
            except OSError as error:
                errors.append(error)

        helper = threading.Thread(target=copy_half, name="payload-copy", daemon=True)
        try:
            if half:
                start_thread(helper)
        except LimitError:
            half = 0
        try:
            self._copy(address + half, at + half, size - half)
        finally:
            if half:
                helper.join()  # the memory must stay until it is through
        if errors:
            raise errors[0]

    def _copy(self, address: int, at: int, size: int) -> None:
        for frame, skip, count in self._parts(at, size):
            if isinstance(frame, Bulk):  # to map it would cost a fault for each page
                read_memory(frame.fd, skip, address, count)
            else:
                with address_of(in_place(frame)) as source:
                    copy_memory(address, source + skip, count)
            address += count

    def _parts(self, at: int, size: int) -> Iterator[tuple[Buffer, int, int]]:
        """Return the frames that have these bytes: what is skipped of each, and the bytes that it has of them."""
        number = bisect_right(self._starts, at) - 1
        while size:
            skip = at - self._starts[number]
            count = min(size, len(self._frames[number]) - skip)
            yield self._frames[number], skip, count
            at, size, number = at + count, size - count, number + 1

    def _can_map(self, at: int, end: int) -> bool:
        number = bisect_right(self._starts, at) - 1
        while number < len(self._frames) and self._starts[number] < end:
            if not isinstance(self._frames[number], Bulk) or self._starts[number] % PAGE_BYTES:
                return False
            number += 1
        return True

    def _map(self, address: int, at: int, size: int) -> None:
        for frame, skip, count in self._parts(at, size):
            assert isinstance(frame, Bulk)
            map_file(frame.fd, count, mmap.MAP_PRIVATE | MAP_FIXED, skip, address)
            address += count
