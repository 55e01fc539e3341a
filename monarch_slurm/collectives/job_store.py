"""A ``torch.distributed.Store`` over the job's own messages: nothing listens, and only processes of the job reach it.

    store = JobStore(procs.slice(gpus=0).spawn("store", StoreActor))   # where the procs were spawned
    torch.distributed.init_process_group("gloo", store=store, rank=..., world_size=...)   # in an actor of each rank

torch's ``TCPStore`` takes connections from anybody. Here an operation is a call of a `StoreActor`, over the connections
that the job has and authenticates anyway.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import DistStoreError, QueueEmptyError

from monarch_slurm.actor import Future, SupervisionError
from monarch_slurm.collectives.store_actor import KeyTable, StoreActor, table_here
from monarch_slurm.collectives.torch_gloo import have_groups_prove

_Store: Any = dist.Store  # type: ignore[attr-defined]  # its stub lacks much of what it has

DEFAULT_TIMEOUT = timedelta(seconds=300)
"""That of torch's own stores."""

_ANSWER_S = 300.0
"""How long an operation that waits for no key may take. The timeout of a store is for waits alone, as TCPStore's is."""

_GLOO_READS_TOGETHER = "GLOO_ENABLE_STORE_V2_API"

_made: list[JobStore] = []
"""C++ holds a store by its C++ part, which calls methods of the Python object: that must not be collected before."""


class JobStore(_Store):  # type: ignore[misc]
    """A store whose keys are in a `StoreActor`. It can be pickled, put into a ``PrefixStore``, and used on any thread.

    What waits for keys that do not come raises ``torch.distributed.DistStoreError`` after the timeout, with TCPStore's
    text. Once the actor, its proc or its host has ended, or this process is about to, every operation raises it
    at once, those that wait included.

    The ranks of a gloo group that torch makes over such a store prove to each other that they are of the job, before
    its first operation; if one does not, its making raises `monarch_slurm.collectives.errors.ProofError`.

    Each process keeps the stores that it has made until it ends. ``queue_push`` and its like work here, but not through
    ``PrefixStore``.

    Args:
        actor: a mesh of one `StoreActor`.
        timeout: how long an operation may wait for keys.

    Raises:
        ValueError: the mesh has more than one actor.
    """

    def __init__(self, actor: StoreActor, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__()
        if len(actor) != 1:
            raise ValueError(f"a store has one actor, but the mesh has {len(actor)}: slice it")
        self._actor: Any = actor
        self.set_timeout(timeout)
        os.environ.setdefault(_GLOO_READS_TOGETHER, "1")  # all peers' addresses in one call, not in two each
        have_groups_prove(JobStore)
        _made.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of ``key``."""
        self._ask("set_values", {_key(key): _bytes(value)})

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set the values of several keys at once."""
        if len(keys) != len(values):
            raise DistStoreError("multiSet keys and values vectors must be of same size")
        self._ask("set_values", {_key(key): _bytes(value) for key, value in zip(keys, values, strict=True)})

    def get(self, key: str) -> bytes:
        """Return the value of ``key``, once it is there."""
        (value,) = self.multi_get([key])
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys, once all are there."""
        found: list[bytes] = self._ask_when_there(keys, self.timeout)
        return found

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all keys are there."""
        self._ask_when_there(keys, self.timeout if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        return bool(self._ask("are_there", [_key(key) for key in keys]))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts from 0; return its value.

        Raises:
            torch.distributed.DistStoreError: the key has a value that is no integer, besides what every method raises.
        """
        total = self._ask("add", _key(key), int(amount))
        if total is None:
            raise DistStoreError(f"cannot add to key /{key}: its value is no integer")
        return int(total)

    def append(self, key: str, value: str | bytes) -> None:
        """Put ``value`` behind that of ``key``, or set it."""
        self._ask("append", _key(key), _bytes(value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set the desired value if the present one is the expected one (empty: if there is none); return the value."""
        value: bytes = self._ask("compare_set", _key(key), _bytes(expected_value), _bytes(desired_value))
        return value

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was there."""
        return bool(self._ask("delete_key", _key(key)))

    def delete_prefix(self, prefix: str) -> int:
        """Delete every key that begins with ``prefix``; return how many there were. Whoever waits for one, times out.

        ``PrefixStore("a", store)`` has the prefix ``a/``.
        """
        return int(self._ask("delete_prefix", _key(prefix)))

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return int(self._ask("num_keys"))

    def list_keys(self) -> list[str]:
        """Return all keys."""
        found: list[str] = self._ask("list_keys")
        return found

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put ``value`` at the end of a queue."""
        self._ask("queue_push", _key(key), _bytes(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of a queue.

        Raises:
            torch.distributed.QueueEmptyError: there is none, and ``block`` is false.
        """
        end = time.monotonic() + self.timeout.total_seconds()
        while (value := self._ask("queue_pop", _key(key))) is None:
            if not block:
                raise QueueEmptyError("queue is empty")
            left = max(0.0, end - time.monotonic())
            self._ask_when_there([key], timedelta(seconds=left), self.timeout)
        taken: bytes = value
        return taken

    def queue_len(self, key: str) -> int:
        """Return how many values a queue has."""
        return int(self._ask("queue_len", _key(key)))

    def has_extended_api(self) -> bool:
        """Return whether `append`, `multi_get` and `multi_set` are there: they are."""
        return True

    def clone(self) -> JobStore:
        """Return a store of the same keys with a timeout of its own."""
        return JobStore(self._actor, self.timeout)

    deleteKey = delete_key  # noqa: N815 - the names that C++ calls
    getNumKeys = num_keys  # noqa: N815

    def _ask_when_there(self, keys: Sequence[str], timeout: timedelta, asked: timedelta | None = None) -> list[bytes]:
        """Return the values of ``keys`` once all are there; ``asked`` is the timeout that errors name."""
        seconds = max(0.0, timeout.total_seconds())
        names = [_key(key) for key in keys]
        table = table_here(self._actor)
        try:
            found: list[bytes]
            if table is not None:
                found = self._wait_here(table, names, seconds)
            else:
                found = self._told(lambda: self._actor.ask_when_there.call_one(names, seconds).get(seconds))
        except TimeoutError:
            milliseconds = round((asked or timeout).total_seconds() * 1000)
            named = ", ".join(f"/{name}" for name in names)
            raise DistStoreError(f"wait timeout after {milliseconds}ms, keys: {named}") from None
        return found

    def _wait_here(self, table: KeyTable, names: list[str], seconds: float) -> list[bytes]:
        """Wait for keys that an actor of this process holds."""
        arrived: Future[list[bytes]] = Future._pending()

        def act() -> None:
            over, values = table.over, table.values(names)
            if over:
                arrived._fail(DistStoreError(f"{self} is gone: {over}"))
            else:
                arrived._resolve(lambda: values)

        with table.lock:
            table.when_there(names, time.monotonic() + seconds, act)
        return arrived.get(seconds)

    def _ask(self, what: str, *args: Any) -> Any:
        """Call a method of the table that answers at once."""
        table = table_here(self._actor)
        if table is not None:
            with table.lock:
                if table.over:
                    raise DistStoreError(f"{self} is gone: {table.over}")
                return getattr(table, what)(*args)
        try:
            return self._told(lambda: self._actor.ask.call_one(what, *args).get(_ANSWER_S))
        except TimeoutError:
            raise DistStoreError(f"{self} has not answered within {_ANSWER_S:g} s: its process hangs") from None

    def _told(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except SupervisionError as error:
            raise DistStoreError(f"{self} is gone: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return JobStore, (self._actor, self.timeout)

    def __repr__(self) -> str:
        return f"JobStore({self._actor!r})"


def _key(key: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a key is a str, not a {type(key).__name__}")
    return key


def _bytes(value: str | bytes) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"a value is a str or bytes, not a {type(value).__name__}")
    return bytes(value)
