"""Collectives of CPU tensors over gloo.

One thread per communicator runs the operations in the order they were asked for. An abort lets every waiter go at once,
then breaks the connections, which ends the operation that the thread waits in. The same is done when the program ends:
the interpreter kills threads that come back from C++ code while it ends, and the process with them.

An average is summed in a dtype of a wider range, which takes a copy and twice the bytes (of bfloat16 four times), so
that it neither overflows nor underflows.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from monarch_slurm.collectives.agreement import (
    Pending,
    PendingReceive,
    PendingSend,
    Plan,
    agree,
    agree_on_counts,
    complete,
)
from monarch_slurm.collectives.background import GRACE_S
from monarch_slurm.collectives.checks import GLOO_DTYPES
from monarch_slurm.collectives.errors import CollectiveError, PeerLostError
from monarch_slurm.collectives.proof import prove
from monarch_slurm.collectives.rendezvous import Invitation, own_address
from monarch_slurm.collectives.work import HostWork, Work
from monarch_slurm.wire.task_limits import start_thread

if TYPE_CHECKING:
    import torch

_NOBODYS_TAG = 0x7FFFFFFF
"""Of messages that no rank sends; gloo's tags have 31 bits."""
_END_S = 5.0
_NO_LIMIT = timedelta(days=365)

_all: weakref.WeakSet[GlooTransport] = weakref.WeakSet()


class GlooTransport:
    """One rank's end of a gloo group. The arguments of its operations have been checked."""

    reducible = GLOO_DTYPES
    library = "gloo"

    def __init__(
        self, store: Any, rank: int, size: int, address: str, timeout_s: float, secret: bytes, name: str
    ) -> None:
        from torch.distributed import ProcessGroupGloo as Gloo

        group: Any = Gloo  # its stub lacks most of what it has
        self.rank = rank
        self.size = size
        self._store = store
        self._address = address
        self._timeout_s = timeout_s
        self._secret = secret
        self._name = name
        options = group._Options()
        options._devices = [group.create_device(hostname=address)]
        options._timeout = timedelta(seconds=timeout_s)
        try:
            self._group: Any = group(store, rank, size, options)
            prove(self._group, rank, size, secret, name)
        except RuntimeError as error:
            raise CollectiveError(f"rank {rank} of {size} could not reach all peers from {address}: {error}") from error
        # As on GPUs: a rank may come late to an operation, as late as it likes. Of dead and hung ones others tell.
        self._group._set_default_timeout(_NO_LIMIT)
        self._failure: BaseException | None = None
        self._pending: set[HostWork] = set()
        self._lock = threading.Lock()
        self._aborted = threading.Event()
        self._busy = False
        self._queue: queue.SimpleQueue[tuple[list[HostWork], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._grouped: list[tuple[HostWork, Callable[[], Pending]]] | None = None
        self._depth = 0
        self._pid = os.getpid()
        self._worker = threading.Thread(target=self._run, name=f"gloo-{rank}", daemon=True)
        start_thread(self._worker)
        _all.add(self)

    @classmethod
    def join(cls, invitation: Invitation, rank: int, size: int, timeout_s: float) -> GlooTransport:
        """Join by an invitation; blocks until all ranks are there and have proved that they have it, too."""
        from torch._C._distributed_c10d import PrefixStore

        from monarch_slurm.collectives.job_store import JobStore

        if invitation.store is None:
            raise CollectiveError("the invitation names no store: join by what invite() has returned, sent by a call")
        store = PrefixStore(invitation.name, JobStore(invitation.store, timedelta(seconds=timeout_s)))
        address = own_address(invitation.address)
        return cls(store, rank, size, address, timeout_s, invitation.token, invitation.name)

    def split(self, name: str, members: Sequence[int] | None, color: int) -> GlooTransport | None:
        """Make a group of ``members`` of this one; None where this rank is not among them."""
        from torch._C._distributed_c10d import PrefixStore

        del color
        if members is None:
            return None
        store, rank, size = PrefixStore(f"{name}/", self._store), members.index(self.rank), len(members)
        return GlooTransport(store, rank, size, self._address, self._timeout_s, self._secret, f"{self._name}/{name}")

    def all_reduce(self, tensor: torch.Tensor, op: str) -> Work:
        """Reduce in place."""
        from torch.distributed import AllreduceOptions

        options = AllreduceOptions()
        options.reduceOp = _reduce_op(op)

        def run() -> None:
            self._agree("all_reduce", tensor, numel=tensor.numel(), op=op)
            if op != "avg":
                self._group.allreduce([tensor], options).wait()
                return
            sums = _widened(tensor, self.size)
            self._group.allreduce([sums], options).wait()
            _average(sums, self.size, tensor)

        return self._submit("all_reduce", run)

    def reduce(self, tensor: torch.Tensor, root: int, op: str) -> Work:
        """Reduce to ``root``; what others hold afterwards is their own input."""
        from torch.distributed import ReduceOptions

        options = ReduceOptions()
        options.reduceOp = _reduce_op(op)
        options.rootRank = root

        def run() -> None:
            self._agree("reduce", tensor, numel=tensor.numel(), root=root, op=op)
            buffer = tensor
            if op == "avg":
                buffer = _widened(tensor, self.size)
            elif self.rank != root:
                buffer = tensor.clone()  # gloo uses the others' buffers as scratch
            self._group.reduce([buffer], options).wait()
            if op == "avg" and self.rank == root:
                _average(buffer, self.size, tensor)

        return self._submit("reduce", run)

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, op: str) -> Work:
        """Reduce and give each rank its part."""
        from torch.distributed import ReduceScatterOptions

        options = ReduceScatterOptions()
        options.reduceOp = _reduce_op(op)

        def run() -> None:
            self._agree("reduce_scatter", source, numel=source.numel(), op=op)
            if op != "avg":
                self._group._reduce_scatter_base(output.view(-1), source.view(-1), options).wait()
                return
            wide = _widened(source.view(-1), self.size)
            sums = wide.new_empty(output.numel())
            self._group._reduce_scatter_base(sums, wide, options).wait()
            _average(sums, self.size, output)

        return self._submit("reduce_scatter", run)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """Copy ``root``'s tensor to all."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = root

        def run() -> None:
            self._agree("broadcast", tensor, numel=tensor.numel(), root=root)
            self._group.broadcast([_raw(tensor)], options).wait()

        return self._submit("broadcast", run)

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Work:
        """Concatenate all ranks' tensors."""

        def run() -> None:
            self._agree("all_gather", source, numel=source.numel())
            self._group._allgather_base(_raw(output), _raw(source)).wait()

        return self._submit("all_gather", run)

    def all_to_all(
        self, output: torch.Tensor, source: torch.Tensor, output_counts: Sequence[int], input_counts: Sequence[int]
    ) -> Work:
        """Exchange parts; counts are in elements."""
        width = source.element_size()
        received = [count * width for count in output_counts]
        sent = [count * width for count in input_counts]

        def run() -> None:
            self._agree("all_to_all", source)
            agree_on_counts(self._group, self.size, output_counts, input_counts)
            self._group.alltoall_base(_raw(output), _raw(source), received, sent).wait()

        return self._submit("all_to_all", run)

    def send(self, tensor: torch.Tensor, peer: int) -> Work:
        """Send to ``peer``."""
        return self._submit_pair("send", lambda: PendingSend(self._group, tensor, _raw(tensor), peer))

    def recv(self, tensor: torch.Tensor, peer: int) -> Work:
        """Receive from ``peer``."""
        return self._submit_pair("recv", lambda: PendingReceive(self._group, tensor, _raw(tensor), self.rank, peer))

    def barrier(self) -> Work:
        """Wait for all ranks."""
        return self._submit("barrier", lambda: self._agree("barrier"))

    def group_start(self) -> None:
        """Collect sends and receives until the outermost `group_end` starts them together."""
        self._depth += 1
        if self._depth == 1:
            self._grouped = []

    def group_end(self) -> Work:
        """Start what was collected."""
        self._depth -= 1
        if self._depth:
            inner = HostWork("group")
            inner.finish()
            return inner
        started, self._grouped = self._grouped or [], None

        return self._submit("group", lambda: complete([start for _, start in started]), [work for work, _ in started])

    def abort(self, failure: BaseException) -> None:
        """Fail everything that is pending and all that comes."""
        if self._end(failure):
            # Not a daemon: the interpreter must not end in the middle of it.
            start_thread(threading.Thread(target=self._break, name="gloo-abort"))

    def close(self, failure: BaseException) -> None:
        """Wait for what was started, then end."""
        if self._failure is None:
            self._submit("close", lambda: None).wait(self._timeout_s)
            self._end(failure)

    def end_with_program(self) -> None:
        """Have the thread end before the interpreter does."""
        if self._pid == os.getpid():  # what a fork has inherited is its parent's
            if self._end(PeerLostError("the program ends")) and self._busy:
                self._break()
            self._worker.join(_END_S)

    def _end(self, failure: BaseException) -> bool:
        """Let all waiters go; returns False where it had ended before."""
        with self._lock:
            if self._failure is not None:
                return False
            self._failure = failure
            pending, self._pending = self._pending, set()
        self._queue.put(None)
        for work in pending:
            work.finish(failure)
        self._aborted.set()
        return True

    def _break(self) -> None:
        """Break all connections: gloo does so when one operation is out of time."""
        import torch

        for peer in range(self.size):
            if peer != self.rank:
                try:
                    pending = self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, _NOBODYS_TAG)
                    pending.wait(timedelta(milliseconds=1))
                except RuntimeError:  # out of time, or broken already
                    continue

    def _agree(
        self, operation: str, tensor: torch.Tensor | None = None, *, numel: int = -1, root: int = -1, op: str = ""
    ) -> None:
        agree(self._group, self.size, Plan.of(operation, tensor, numel=numel, root=root, op=op))

    def _submit_pair(self, name: str, start: Callable[[], Pending]) -> Work:
        if self._grouped is None:
            return self._submit(name, lambda: complete([start]))
        work = self._new_work(name)
        self._grouped.append((work, start))
        return work

    def _submit(self, name: str, run: Callable[[], Any], parts: Sequence[HostWork] = ()) -> Work:
        """Have the thread call ``run``; the works of ``parts`` end with it."""
        work = self._new_work(name)
        self._queue.put(([work, *parts], run))
        return work

    def _new_work(self, name: str) -> HostWork:
        work = HostWork(f"{name} of rank {self.rank} of {self.size}")
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._pending.add(work)
        return work

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            works, run = item
            failure: BaseException | None = None
            try:
                self._busy = True
                if self._failure is None:
                    run()
            except BaseException as error:  # the waiters get it
                failure = error
                # A broken connection has no rank. The control plane's news, which has, may be on its way.
                self._aborted.wait(GRACE_S if isinstance(error, RuntimeError) else 0.0)
            self._busy = False
            for work in works:
                work.finish(failure)
            with self._lock:
                self._pending.difference_update(works)


@atexit.register
def _end_all() -> None:
    for transport in list(_all):
        transport.end_with_program()


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor: moving them works for every dtype."""
    import torch

    return tensor.detach().view(-1).view(torch.uint8)


def _reduce_op(op: str) -> Any:
    from torch.distributed import ReduceOp

    return {
        "sum": ReduceOp.SUM,
        "avg": ReduceOp.SUM,
        "prod": ReduceOp.PRODUCT,
        "max": ReduceOp.MAX,
        "min": ReduceOp.MIN,
    }[op]


def _widened(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """A copy whose sum over ``size`` ranks is in range: of float64, which has no wider dtype, a power of two less."""
    import torch

    if tensor.dtype == torch.float64:
        return tensor.detach() / _power_of_two(size)
    return tensor.detach().to(torch.float32 if tensor.dtype == torch.float16 else torch.float64)


def _average(sums: torch.Tensor, size: int, output: torch.Tensor) -> None:
    import torch

    divisor = size / _power_of_two(size) if sums.dtype == torch.float64 and output.dtype == torch.float64 else size
    output.detach().copy_((sums / divisor).view(output.shape))


def _power_of_two(size: int) -> float:
    return float(1 << (size - 1).bit_length())
