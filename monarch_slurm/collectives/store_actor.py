"""The actor that holds the keys of a `monarch_slurm.collectives.job_store.JobStore`.

It needs no torch, so that a program without it can spawn the store of its procs.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from monarch_slurm.actor import Actor, Port, context, endpoint

_INT64 = 1 << 64


class KeyTable:
    """Keys, their values, and whoever waits for keys to appear. Values are bytes; so are the items of queues.

    Threads of the actor's own process use it without a message, so whoever calls a method holds `lock`.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.over = ""
        """Why no key appears any more; empty while the actor runs."""
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._waits: dict[int, _Wait] = {}
        self._waits_of_key: dict[str, set[int]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._numbers = itertools.count()

    def __contains__(self, key: str) -> bool:
        return key in self._values or key in self._queues

    def num_keys(self) -> int:
        """Return how many keys have a value."""
        return len(self._values)

    def are_there(self, keys: Iterable[str]) -> bool:
        """Return whether all ``keys`` are there."""
        return all(key in self for key in keys)

    def list_keys(self) -> list[str]:
        """Return the keys that have a value."""
        return list(self._values)

    def values(self, keys: Iterable[str]) -> list[bytes]:
        """Return the values of ``keys``; empty for a key that only has a queue, as TCPStore does."""
        return [self._values.get(key, b"") for key in keys]

    def set_values(self, values: dict[str, bytes]) -> None:
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
        self.set_values({key: str(total).encode()})
        return total

    def append(self, key: str, value: bytes) -> None:
        """Put ``value`` behind that of ``key``."""
        self.set_values({key: self._values.get(key, b"") + value})

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set ``desired`` if the value is ``expected``, or if that is empty and there is no value; return the value.

        Without a value, and with another one expected, return ``expected``.
        """
        found = self._values.get(key)
        if found == expected or (found is None and not expected):
            self.set_values({key: desired})
            return desired
        return expected if found is None else found

    def delete_key(self, key: str) -> bool:
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

    def queue_push(self, key: str, value: bytes) -> None:
        """Put ``value`` at the end of the queue ``key``."""
        self._queues.setdefault(key, deque()).append(value)
        self._appeared(key)

    def queue_pop(self, key: str) -> bytes | None:
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
        """Call ``act`` once all ``keys`` are there, or none can come any more.

        Args:
            until: time (`time.monotonic`) after which nobody waits any more.
        """
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] < now:
            self._forget(heapq.heappop(self._deadlines)[1])
        missing = {key for key in keys if key not in self}
        if not missing or self.over:
            act()
            return
        number = next(self._numbers)
        self._waits[number] = _Wait(keys, missing, act)
        heapq.heappush(self._deadlines, (until, number))
        for key in missing:
            self._waits_of_key.setdefault(key, set()).add(number)

    def end(self, why: str) -> None:
        """End all waits, for the actor has ended; ``act`` is called, and finds `over`."""
        self.over = why
        waits, self._waits = self._waits, {}
        self._waits_of_key.clear()
        for wait in waits.values():
            wait.act()

    def waits(self) -> int:
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


_here: dict[tuple[str, int], KeyTable] = {}
"""The tables of this process, by the id of the actor's mesh and its rank there."""


def table_here(actor: Any) -> KeyTable | None:
    """Return the keys that a `StoreActor` holds; None if it runs in another process."""
    return _here.get((actor._ref.mesh, actor._shape.ndslice.get(0)))


class StoreActor(Actor):
    """Holds the keys of a store. Spawn it on one proc and give `JobStore` the mesh that ``spawn`` returns.

    It takes one message at a time. A wait is answered when its keys are there and holds up nothing else.
    """

    def __init__(self) -> None:
        self._table = KeyTable()
        instance = context().actor_instance
        self._key = instance.key, instance.base_rank
        _here[self._key] = self._table

    def __cleanup__(self, exc: Exception | None) -> None:
        """End what threads of this process wait for."""
        _here.pop(self._key, None)
        with self._table.lock:
            self._table.end("its actor has ended")

    @endpoint
    def ask(self, what: str, *args: Any) -> Any:
        """Call a method of the table that answers at once."""
        with self._table.lock:
            return getattr(self._table, what)(*args)

    @endpoint(explicit_response_port=True)  # type: ignore[untyped-decorator]
    def ask_when_there(self, port: Port[list[bytes]], keys: list[str], within_s: float) -> None:
        """Answer with the values of ``keys`` once all are there; not at all after ``within_s`` seconds."""
        with self._table.lock:
            self._table.when_there(keys, time.monotonic() + within_s, lambda: self._answer(port, keys))

    def _answer(self, port: Port[list[bytes]], keys: list[str]) -> None:
        if not self._table.over:  # else the runtime tells whoever waits
            port.send(self._table.values(keys))

    def __repr__(self) -> str:
        return f"StoreActor({self._table.num_keys()} keys, {self._table.waits()} waits)"
