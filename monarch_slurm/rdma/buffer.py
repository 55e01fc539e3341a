"""What users hold: buffers, and batches of transfers."""

from __future__ import annotations

import operator
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from monarch_slurm.actor.future import Future
from monarch_slurm.rdma.choice import RDMATcpFallbackWarning, get_rdma_backend
from monarch_slurm.rdma.engine import Begun, Op, Target
from monarch_slurm.rdma.errors import RDMAError, RDMATimeoutError, gathered
from monarch_slurm.rdma.manager import Manager, look_after, manager
from monarch_slurm.rdma.memory import Memory, memory_of
from monarch_slurm.rdma.peer import Home
from monarch_slurm.rdma.samehost import INLINE_BYTES, SharedMemory

_DROP_SECONDS = 60

_warned = False


class RDMABuffer:
    """A reference to memory of one process that any process of the job can read and write, while the owner does
    nothing.

    It is a view: nothing is copied, and the memory is kept until `drop`. The reference is small; send it to actors as
    an argument. Whoever holds it can reach the memory, so it belongs nowhere but in messages of the job.

    Transfers are not ordered against the owner's own reads and writes: agree by messages who touches the memory when.

    Args:
        data: a contiguous tensor of any shape, type and device, or a C-contiguous memoryview. Peers on this host map
            memory of a GPU; for others it bounces through host memory.

    Raises:
        ValueError: ``data`` is something else, or has no bytes.
        RuntimeError: the settings leave no way of transfer.
    """

    _home: Home
    _target: Target
    _readonly: bool
    _direct: bool
    _backend: str

    def __init__(self, data: Any) -> None:
        memory = memory_of(data)
        if memory.nbytes == 0:
            raise ValueError("Cannot create RDMABuffer with size 0.")
        self._backend = get_rdma_backend()
        if self._backend == "none":
            raise RuntimeError("no RDMA backend: there is no RDMA device, and rdma_allow_tcp_fallback is off")
        if self._backend == "tcp":
            _warn_of_tcp()
        here = manager()
        entry = here.registry.add(memory)
        mapping = SharedMemory.find(memory.address, memory.nbytes) if memory.stager is None else None
        self._home = here.home
        self._target = Target(entry.slot, entry.key, entry.slot_address, memory.address, memory.nbytes, mapping)
        self._readonly = memory.readonly
        self._direct = memory.stager is None

    def size(self) -> int:
        """Return the length in bytes."""
        return self._target.nbytes

    @property
    def backend(self) -> str:
        """What the owner offers to other hosts: ``"ibverbs"`` or ``"tcp"``. `recent_transfers` has what was used."""
        return self._backend

    @property
    def owner(self) -> str:
        """Name of the owner's transfer manager, with its process."""
        return f"rdma_manager@{self._home.process}"

    def read_into(self, dst: Any, *, timeout: int = 60) -> Future[None]:
        """Copy the whole buffer to the start of ``dst``.

        Args:
            dst: a contiguous tensor or memoryview of at least `size` bytes.
            timeout: whole seconds.

        Returns:
            A future that is done when the bytes are there. It raises an `RDMAError` if they cannot be had.

        Raises:
            ValueError: ``dst`` is too small, read-only or not contiguous.
            TypeError: ``timeout`` is no integer.
            OverflowError: it is negative or too large.
        """
        return RDMAAction().read_remote(dst, self).submit(timeout=timeout)

    def write_from(self, src: Any, *, timeout: int = 60) -> Future[None]:
        """Copy all of ``src`` to the start of the buffer.

        Args:
            src: a contiguous tensor or memoryview of at most `size` bytes.
            timeout: whole seconds.

        Returns:
            A future that is done when the bytes are there. It raises an `RDMAError` if they cannot be brought.

        Raises:
            ValueError: ``src`` is too large or not contiguous, or the buffer is read-only.
            TypeError: ``timeout`` is no integer.
            OverflowError: it is negative or too large.
        """
        return RDMAAction().write_remote(self, src).submit(timeout=timeout)

    def drop(self) -> Future[None]:
        """Take the buffer back, from any process that holds it: later transfers fail, and its owner frees the memory.

        The future is done when no transfer touches the memory any more; it raises `BufferGoneError` if it was dropped
        before.
        """
        future: Future[None] = Future._pending()
        here = manager()
        deadline = time.monotonic() + _DROP_SECONDS
        slot, key = self._target.slot, self._target.key

        def work() -> None:
            if self._home == here.home:
                here.drop(slot, key, deadline)
            else:
                fields = {"slot": slot, "key": key, "seconds": _DROP_SECONDS - 5}
                here.ask(self._home, "drop", fields, deadline)

        if self._home == here.home:
            here.workers.run(lambda: _settle(future, work))
        else:
            late = RDMATimeoutError("the drop has waited for others of its owner all its time; it may be tried again")
            here.run(self._home, "drop", lambda: _settle(future, work), lambda: future._fail(late), deadline)
        return future

    def __reduce__(self) -> tuple[Any, ...]:
        look_after(self._home, self._target.slot)
        return _restore, (tuple(self._home), tuple(self._target_fields()), self._readonly, self._direct, self._backend)

    def _target_fields(self) -> tuple[Any, ...]:
        target = self._target
        return target.slot, target.key, target.slot_address, target.address, target.nbytes, target.mapping

    def __repr__(self) -> str:
        return f"<RDMABuffer {self._target.nbytes} bytes of {self._home.process}>"


def _restore(home: Any, target: Any, readonly: bool, direct: bool, backend: str) -> RDMABuffer:
    buffer = RDMABuffer.__new__(RDMABuffer)
    buffer._home, buffer._target = Home(*home), Target(*target)
    buffer._readonly, buffer._direct, buffer._backend = readonly, direct, backend
    return buffer


class _Queued(NamedTuple):
    write: bool
    memory: Memory
    nbytes: int
    buffer: RDMABuffer


class RDMAAction:
    """Many transfers in one: 300 tensors of a state dict are one action, one future and one round of the engine.

    Within one `submit` the transfers run in any order and at the same time. An action may be submitted again and again.
    """

    def __init__(self) -> None:
        self._queue: list[_Queued] = []

    def read_remote(self, dst: Any, src: RDMABuffer) -> RDMAAction:
        """Add a copy of all of ``src`` to ``dst``; return this action.

        Raises:
            ValueError: ``dst`` is too small, read-only or not contiguous.
        """
        memory = memory_of(dst)
        if memory.nbytes < src.size():
            raise ValueError(
                f"destination local memory size ({memory.nbytes}) must be >= remote buffer size ({src.size()})"
            )
        if memory.readonly:
            raise ValueError("the destination is read-only memory")
        self._queue.append(_Queued(False, memory, src.size(), src))
        return self

    def write_remote(self, dst: RDMABuffer, src: Any) -> RDMAAction:
        """Add a copy of all of ``src`` to the start of ``dst``; return this action.

        Raises:
            ValueError: ``src`` is too large or not contiguous, or the buffer is read-only.
        """
        memory = memory_of(src)
        if memory.nbytes > dst.size():
            raise ValueError(f"source local memory size ({memory.nbytes}) must be <= remote buffer size ({dst.size()})")
        if dst._readonly:
            raise ValueError("the buffer was made of read-only memory and cannot be written")
        if memory.nbytes:
            self._queue.append(_Queued(True, memory, memory.nbytes, dst))
        return self

    def fetch_add(self, src: Any, dst: Any, add: int) -> NoReturn:
        """Not offered: transfers have no atomic operations."""
        raise NotImplementedError("fetch_add is not supported")

    def compare_and_swap(self, src: Any, dst: Any, compare: int, swap: int) -> NoReturn:
        """Not offered: transfers have no atomic operations."""
        raise NotImplementedError("compare_and_swap is not supported")

    def submit(self, *, timeout: int = 60) -> Future[None]:
        """Start all transfers of the queue; the queue stays.

        Args:
            timeout: whole seconds, for all of it. With 0, nothing is transferred and the future raises
                `RDMATimeoutError`.

        Returns:
            A future that is done when all bytes are there. It raises one `RDMAError` that tells of every failure.

        Raises:
            TypeError: ``timeout`` is no integer.
            OverflowError: it is negative or too large.
        """
        seconds = operator.index(timeout)
        if not 0 <= seconds < 2**64:
            raise OverflowError(f"timeout {seconds} is out of range: whole seconds from 0 to 2**64 - 1")
        if not self._queue:
            return Future._of(None)
        if seconds == 0:
            late: Future[None] = Future._pending()
            late._fail(gathered([RDMATimeoutError("a timeout of 0 s is over before a transfer can begin")]))
            return late
        here = manager()
        deadline = time.monotonic() + min(seconds, 10**9)
        batch = _Batch(here, list(self._queue), deadline)
        if batch.is_small_and_local():
            batch.run_here()
        else:
            batch.start()
        return batch.future

    def __len__(self) -> int:
        return len(self._queue)

    def __repr__(self) -> str:
        return f"<RDMAAction of {len(self._queue)} transfers, {sum(item.nbytes for item in self._queue)} bytes>"


class _Batch:
    """One submit: the transfers grouped by owner and kind of memory, each group on a thread."""

    def __init__(self, here: Manager, queue: list[_Queued], deadline: float) -> None:
        self.future: Future[None] = Future._pending()
        self._here = here
        self._deadline = deadline
        self._groups: dict[tuple[Home, bool, bool], list[_Queued]] = {}
        for item in queue:
            buffer = item.buffer
            group = buffer._home, buffer._target.mapping is not None, buffer._direct
            self._groups.setdefault(group, []).append(item)
        self._left = len(self._groups)
        self._begun: list[Begun] = []
        self._failures: list[RDMAError] = []
        self._lock = threading.Lock()

    def is_small_and_local(self) -> bool:
        ((home, *_), items), *others = self._groups.items()
        return not others and home == self._here.home and sum(item.nbytes for item in items) <= INLINE_BYTES

    def run_here(self) -> None:
        for group, items in self._groups.items():
            self._run(group, items)

    def start(self) -> None:
        for group, items in self._groups.items():
            begun = self._here.begin(*group, _ops(items))
            if begun is None:
                self._run_in_turn(group, items)
            elif begun.then(self._ended).is_complete:
                begun.finish()
            else:
                self._begun.append(begun)
                self._here.workers.run(begun.finish_for_nobody)
        if self._begun:
            self.future._help_with(self._finish_begun)

    def _run_in_turn(self, group: tuple[Home, bool, bool], items: list[_Queued]) -> None:
        def too_late() -> None:
            self._ended(RDMATimeoutError("the transfer has waited for others from and to the same owner all its time"))

        self._here.run(group[0], "transfer", lambda: self._run(group, items), too_late, self._deadline)

    def _finish_begun(self) -> None:
        for begun in self._begun:
            begun.finish()

    def _run(self, group: tuple[Home, bool, bool], items: list[_Queued]) -> None:
        failure: RDMAError | None
        try:
            failure = self._here.transfer(*group, _ops(items), self._deadline)
        except Exception as error:  # of a device's stager, for instance: whoever waits must hear of it
            failure = RDMAError(f"unexpected: {error!r}")
        self._ended(failure)

    def _ended(self, failure: RDMAError | None) -> None:
        if failure is not None:
            self._failures.append(failure)
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last and self._failures:
            self.future._fail(gathered(self._failures))
        elif last:
            self.future._resolve(lambda: None)


def _ops(items: list[_Queued]) -> list[Op]:
    return [
        Op(item.write, item.memory.address, item.nbytes, item.buffer._target, item.memory.anchor, item.memory.stager)
        for item in items
    ]


def _settle(future: Future[None], work: Callable[[], None]) -> None:
    try:
        work()
    except BaseException as error:  # whoever waits for the future gets it
        future._fail(error)
    else:
        future._resolve(lambda: None)


def _warn_of_tcp() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "no RDMA device is used: buffers travel between hosts over TCP, which is slower", RDMATcpFallbackWarning, 3
        )
