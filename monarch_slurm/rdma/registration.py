"""Local memory that stays registered with the RDMA device between transfers.

What is registered is the allocation: a tensor's storage, all of what a memoryview is of. So the slices of a tensor
share one registration, which is for reading and writing. Memory of a GPU is registered as far as it is used: an
allocation of the driver may end within a storage.

A storage that is resized in place (``storage.resize_``) is registered anew, unless it lies where it lay before, at the
same size, in other pages: do not do that between transfers.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from monarch_slurm.rdma.errors import RegistrationError
from monarch_slurm.rdma.memory import Stager, extent_of


class _Range(NamedTuple):
    """What is registered: the id of the object whose memory it is, where, how many bytes, and whether for writing."""

    anchor: int
    address: int
    nbytes: int
    write: bool


class RegistrationCache:
    """Registrations of local memory, kept while the object that the memory belongs to lives, and while there is room.

    Args:
        register: registers memory: address, bytes, whether it will be written, whether peers reach it, its stager.
        limit: bytes that stay registered.
    """

    def __init__(self, register: Callable[[int, int, bool, bool, Stager | None], Any], limit: int) -> None:
        self._register = register
        self._limit = limit
        self._lock = threading.RLock()
        self._kept: OrderedDict[_Range, Any] = OrderedDict()
        self._refused: set[_Range] = set()
        """Allocations that the device did not take as a whole."""
        self._watched: dict[int, weakref.finalize[Any, Any]] = {}
        self.nbytes = 0
        self.hits = 0

    def get(self, address: int, nbytes: int, write: bool, anchor: object | None, stager: Stager | None = None) -> Any:
        """Return a registration; it is valid as long as the caller holds it.

        Raises:
            RegistrationError: the device does not take the memory.
            NoDirectWayError: it is memory of a GPU, which the device cannot reach.
        """
        if anchor is None:
            return self._register(address, nbytes, write, False, stager)
        part = _Range(id(anchor), address, nbytes, write)
        whole = self._whole(part, anchor) if stager is None else part
        with self._lock:
            for kept in (whole, part):
                region = self._kept.get(kept)
                if region is not None:
                    self._kept.move_to_end(kept)
                    self.hits += 1
                    return region
            is_refused = whole in self._refused
        if whole != part and not is_refused:
            try:
                return self._keep(whole, anchor, self._register(whole.address, whole.nbytes, True, False, None))
            except RegistrationError:  # it is read-only, or more than may be locked
                with self._lock:
                    self._refused.add(whole)
                    self._watch(anchor)
        return self._keep(part, anchor, self._register(address, nbytes, write, False, stager))

    def _whole(self, part: _Range, anchor: object) -> _Range:
        start, size = extent_of(anchor) or (part.address, part.nbytes)
        is_in_it = start <= part.address and part.address + part.nbytes <= start + size
        return _Range(part.anchor, start, size, True) if is_in_it and size <= self._limit else part

    def _keep(self, what: _Range, anchor: object, region: Any) -> Any:
        with self._lock:
            self._watch(anchor)
            if what not in self._kept:
                self._kept[what] = region
                self.nbytes += what.nbytes
            while self.nbytes > self._limit and self._kept:
                old, _ = self._kept.popitem(last=False)
                self.nbytes -= old.nbytes
        return region

    def _watch(self, anchor: object) -> None:
        if id(anchor) not in self._watched:
            self._watched[id(anchor)] = weakref.finalize(anchor, self._forget, id(anchor))
            self._watched[id(anchor)].atexit = False

    def _forget(self, anchor: int) -> None:
        with self._lock:
            self._watched.pop(anchor, None)
            self._refused = {what for what in self._refused if what.anchor != anchor}
            for what in [what for what in self._kept if what.anchor == anchor]:
                del self._kept[what]
                self.nbytes -= what.nbytes

    def __len__(self) -> int:
        return len(self._kept)
