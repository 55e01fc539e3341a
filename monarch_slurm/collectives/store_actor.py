"""The actor that holds the keys of a `monarch_slurm.collectives.job_store.JobStore`.

It needs no torch, so that a program without it can spawn the store of its procs.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable

from monarch_slurm.actor import Actor, Port, endpoint

_INT64 = 1 << 64


class KeyTable:
    """Keys, their values, and whoever waits for keys to appear. Values are bytes; so are the items of queues."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._waits: dict[int, _Wait] = {}
        self._waits_of_key: dict[str, set[int]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._numbers = itertools.count()

    def __contains__(self, key: str) -> bool:
        return key in self._values or key in self._queues

    def __len__(self) -> int:
        return len(self._values)

    def keys(self) -> list[str]:
        """Return the keys that have a value."""
        return list(self._values)

    def values(self, keys: Iterable[str]) -> list[bytes]:
        """Return the values of ``keys``; empty for a key that only has a queue, as TCPStore does."""
        return [self._values.get(key, b"") for key in keys]

    def set(self, values: dict[str, bytes]) -> None:
        """Set all of ``values``, then end the waits for them."""
        self._values.update(values)
        for key in values:
            self._appeared(key)

    def add(self, key: str, amount: int) -> int | None:
        """Add to a decimal number of 64 bits, which starts from 0; None if the value is no such number."""
        try:
            total = int(self._values.get(key, b"0")) + amount
        except ValueError:
            return None
        total = (total + _INT64 // 2) % _INT64 - _INT64 // 2  # it wraps around, as in C++
        self.set({key: str(total).encode()})
        return total

    def append(self, key: str, value: bytes) -> None:
        """Put ``value`` behind that of ``key``."""
        self.set({key: self._values.get(key, b"") + value})

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set ``desired`` if the value is ``expected``, or if that is empty and there is no value; return the value.

        Without a value, and with another one expected, return ``expected``.
        """
        found = self._values.get(key)
        if found == expected or (found is None and not expected):
            self.set({key: desired})
            return desired
        return expected if found is None else found

    def delete(self, key: str) -> bool:
        """Delete a key; return whether it had a value."""
        return self._values.pop(key, None) is not None

    def delete_prefix(self, prefix: str) -> int:
        """Delete all keys and queues that begin with ``prefix``, and the waits for such keys; return how many keys."""
        found = [key for key in self._values if key.startswith(prefix)]
        for key in found:
            del self._values[key]
        for key in [key for key in self._queues if key.startswith(prefix)]:
            del self._queues[key]
        for key in [key for key in self._waits_of_key if key.startswith(prefix)]:
            for number in list(self._waits_of_key[key]):
                self._forget(number)
        return len(found)

    def push(self, key: str, value: bytes) -> None:
        """Put ``value`` at the end of the queue ``key``."""
        self._queues.setdefault(key, deque()).append(value)
        self._appeared(key)

    def pop(self, key: str) -> bytes | None:
        """Take the first value of the queue ``key``; None if it is empty."""
        queue = self._queues.get(key)
        if queue is None:
            return None
        value = queue.popleft()
        if not queue:
            del self._queues[key]
        return value

    def queue_len(self, key: str) -> int:
        """Return how many values the queue ``key`` has."""
        return len(self._queues.get(key, ()))

    def when_there(self, keys: list[str], until: float, act: Callable[[], None]) -> None:
        """Call ``act`` once all ``keys`` are there.

        Args:
            until: time (`time.monotonic`) after which nobody waits any more.
        """
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] < now:
            self._forget(heapq.heappop(self._deadlines)[1])
        missing = {key for key in keys if key not in self}
        if not missing:
            act()
            return
        number = next(self._numbers)
        self._waits[number] = _Wait(keys, missing, act)
        heapq.heappush(self._deadlines, (until, number))
        for key in missing:
            self._waits_of_key.setdefault(key, set()).add(number)

    @property
    def waiting(self) -> int:
        """How many waits there are, those included that are out of time since the last `when_there`."""
        return len(self._waits)

    def _appeared(self, key: str) -> None:
        for number in sorted(self._waits_of_key.pop(key, ())):
            wait = self._waits[number]
            wait.missing.discard(key)
            if wait.missing:
                continue
            wait.missing = {other for other in wait.keys if other not in self}  # one may have been deleted meanwhile
            for other in wait.missing:
                self._waits_of_key.setdefault(other, set()).add(number)
            if not wait.missing:
                del self._waits[number]
                wait.act()

    def _forget(self, number: int) -> None:
        wait = self._waits.pop(number, None)
        for key in wait.missing if wait is not None else ():
            numbers = self._waits_of_key[key]
            numbers.discard(number)
            if not numbers:
                del self._waits_of_key[key]


class _Wait:
    def __init__(self, keys: list[str], missing: set[str], act: Callable[[], None]) -> None:
        self.keys, self.missing, self.act = keys, missing, act


class StoreActor(Actor):
    """Holds the keys of a store. Spawn it on one proc and give `JobStore` the mesh that ``spawn`` returns.

    It takes one message at a time. A wait is answered when its keys are there and holds up nothing else.
    """

    def __init__(self) -> None:
        self._table = KeyTable()

    @endpoint
    def set_values(self, values: dict[str, bytes]) -> None:
        """See `KeyTable.set`."""
        self._table.set(values)

    @endpoint(explicit_response_port=True)  # type: ignore[untyped-decorator]
    def get_values(self, port: Port[list[bytes]], keys: list[str], within_s: float) -> None:
        """Answer with the values of ``keys`` once all are there; not at all after ``within_s`` seconds."""
        self._table.when_there(keys, _until(within_s), lambda: port.send(self._table.values(keys)))

    @endpoint(explicit_response_port=True)  # type: ignore[untyped-decorator]
    def wait_for(self, port: Port[None], keys: list[str], within_s: float) -> None:
        """Answer once all ``keys`` are there; not at all after ``within_s`` seconds."""
        self._table.when_there(keys, _until(within_s), lambda: port.send(None))

    @endpoint
    def are_there(self, keys: list[str]) -> bool:
        """Return whether all ``keys`` are there."""
        return all(key in self._table for key in keys)

    @endpoint
    def add(self, key: str, amount: int) -> int | None:
        """See `KeyTable.add`."""
        return self._table.add(key, amount)

    @endpoint
    def append(self, key: str, value: bytes) -> None:
        """See `KeyTable.append`."""
        self._table.append(key, value)

    @endpoint
    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """See `KeyTable.compare_set`."""
        return self._table.compare_set(key, expected, desired)

    @endpoint
    def delete_key(self, key: str) -> bool:
        """See `KeyTable.delete`."""
        return self._table.delete(key)

    @endpoint
    def delete_prefix(self, prefix: str) -> int:
        """See `KeyTable.delete_prefix`."""
        return self._table.delete_prefix(prefix)

    @endpoint
    def list_keys(self) -> list[str]:
        """Return the keys that have a value."""
        return self._table.keys()

    @endpoint
    def num_keys(self) -> int:
        """Return how many keys have a value."""
        return len(self._table)

    @endpoint
    def queue_push(self, key: str, value: bytes) -> None:
        """See `KeyTable.push`."""
        self._table.push(key, value)

    @endpoint
    def queue_pop(self, key: str) -> bytes | None:
        """See `KeyTable.pop`."""
        return self._table.pop(key)

    @endpoint
    def queue_len(self, key: str) -> int:
        """See `KeyTable.queue_len`."""
        return self._table.queue_len(key)

    def __repr__(self) -> str:
        return f"StoreActor({len(self._table)} keys, {self._table.waiting} waits)"


def _until(within_s: float) -> float:
    return time.monotonic() + within_s
