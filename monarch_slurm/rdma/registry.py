"""What this process lets its peers reach: memory by slot and key.

A slot holds the key of its buffer, 0 when it has none. Peers on this host look at the slot with the same system call
that they copy with, so a dropped buffer needs no message. Order of a drop: the key is cleared, then the slot's byte in
the lock file is locked exclusively. A peer locks it shared first, then looks at the key, then copies. So either it sees
no key, or the drop waits for its copy to end; the kernel frees the lock of a peer that dies. Threads of this process
are counted instead.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from monarch_slurm.rdma.errors import BufferGoneError, RDMATimeoutError
from monarch_slurm.rdma.memory import Memory, storage_of
from monarch_slurm.rdma.slot_locks import wait_for_others

BLOCK = 4096
NONCE_BYTES = 16


class Entry:
    """One buffer that peers may reach."""

    def __init__(self, slot: int, slot_address: int, key: int, memory: Memory) -> None:
        self.slot = slot
        self.slot_address = slot_address
        self.key = key
        self.memory = memory
        self.dropped = False
        self.dropping = False
        self.users = 0
        self._storage = storage_of(memory)
        self._storage_address = 0 if self._storage is None else self._storage.data_ptr()

    def is_there(self) -> bool:
        """Return whether the memory is still this buffer's: a tensor's storage may be freed or resized in place."""
        if self._storage is None:
            return True
        address, size = self._storage.data_ptr(), self._storage.nbytes()
        end = self.memory.address + self.memory.nbytes
        return bool(address == self._storage_address and end <= address + size)


class Registry:
    """The buffers of this process. For any thread."""

    def __init__(self) -> None:
        self.nonce = (ctypes.c_ubyte * NONCE_BYTES)(*secrets.token_bytes(NONCE_BYTES))
        self.lock_fd = os.memfd_create("monarch_slurm.rdma", os.MFD_CLOEXEC)
        self._blocks: list[ctypes.Array[ctypes.c_uint64]] = []
        self._free: list[int] = []
        self._entries: dict[int, Entry] = {}
        self._changed = threading.Condition()
        self.on_freed: Callable[[Entry], None] = lambda entry: None
        """Called with a buffer whose memory is found to be its owner's no more."""

    def add(self, memory: Memory) -> Entry:
        """Let peers reach ``memory`` until `drop`, which it is kept for."""
        key = secrets.randbits(63) | 1
        with self._changed:
            if not self._free:
                start = len(self._blocks) * BLOCK
                self._blocks.append((ctypes.c_uint64 * BLOCK)())
                self._free = list(range(start + BLOCK - 1, start - 1, -1))
            slot = self._free.pop()
            block, index = self._blocks[slot // BLOCK], slot % BLOCK
            entry = Entry(slot, ctypes.addressof(block) + 8 * index, key, memory)
            self._entries[slot] = entry
            block[index] = key
        return entry

    def find(self, slot: int, key: int) -> Entry:
        """Return the buffer.

        Raises:
            BufferGoneError: there is none in ``slot``, or not with this key; or its memory was freed.
        """
        entry = self._entries.get(slot)
        if entry is None or entry.key != key or entry.dropped:
            raise BufferGoneError(gone_text(slot))
        if not self.is_there(entry):
            raise BufferGoneError(
                f"the memory of buffer {slot} was freed or moved by its owner (its storage was resized in place)"
            )
        return entry

    def is_there(self, entry: Entry) -> bool:
        """Return whether the buffer's memory is; if not, peers find no key for it from now on."""
        if entry.is_there():
            return True
        with self._changed:
            if self._entries.get(entry.slot) is entry:
                self._blocks[entry.slot // BLOCK][entry.slot % BLOCK] = 0
        self.on_freed(entry)
        return False

    def look_after(self, slot: int) -> None:
        """See to it that peers find no key for the buffer in ``slot`` if its memory is gone."""
        entry = self._entries.get(slot)
        if entry is not None:
            self.is_there(entry)

    @contextmanager
    def using(self, entry: Entry) -> Iterator[None]:
        """Hold off the end of `drop` while the block runs.

        Raises:
            BufferGoneError: the buffer is dropped.
        """
        with self._changed:
            if entry.dropped:
                raise BufferGoneError(gone_text(entry.slot))
            entry.users += 1
        try:
            yield
        finally:
            with self._changed:
                entry.users -= 1
                self._changed.notify_all()

    def drop(self, slot: int, key: int, deadline: float) -> Entry:
        """Take a buffer back; when this returns, no peer on this host touches its memory any more.

        Raises:
            BufferGoneError: it is gone already, or another thread is about to drop it.
            RDMATimeoutError: somebody still copies; the buffer takes no new transfers, and may be dropped once more.
        """
        with self._changed:
            entry = self._entries.get(slot)
            if entry is None or entry.key != key or entry.dropping:
                raise BufferGoneError(gone_text(slot))
            entry.dropped = entry.dropping = True
            self._blocks[slot // BLOCK][slot % BLOCK] = 0
        try:
            self._wait_until_unused(entry, deadline)
        except BaseException:
            entry.dropping = False
            raise
        with self._changed:
            del self._entries[slot]
            self._free.append(slot)
        return entry

    def _wait_until_unused(self, entry: Entry, deadline: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: entry.users == 0, deadline - time.monotonic()):
                raise RDMATimeoutError(f"buffer {entry.slot} is still being copied; it takes no new transfers")
        wait_for_others(self.lock_fd, entry.slot, deadline)

    def __len__(self) -> int:
        return len(self._entries)


def gone_text(slot: int) -> str:
    """Return what to say of a buffer that is not there."""
    return f"buffer {slot} not found: it was dropped by its owner, or the reference is none of this owner's"
