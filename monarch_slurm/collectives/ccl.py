"""Collectives of GPU tensors over RCCL or NCCL: enqueued on the caller's current stream, never waited for here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from monarch_slurm.collectives.background import background_errors
from monarch_slurm.collectives.checks import CCL_DTYPES, OPS, dtype_name
from monarch_slurm.collectives.errors import CollectiveError
from monarch_slurm.collectives.work import DeviceWork, Work
from monarch_slurm.wire.task_limits import start_thread

if TYPE_CHECKING:
    import torch


class CclTransport:
    """One rank's end of an RCCL or NCCL communicator. The arguments of its operations have been checked."""

    reducible = frozenset(CCL_DTYPES)
    library = "RCCL or NCCL"

    def __init__(self, comm: Any, device: torch.device) -> None:
        import torch

        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self._torch = torch
        self._device = device
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._barrier_flag: torch.Tensor | None = None
        self.overdue: Callable[[], str] = lambda: ""
        """Tells of an operation that has not ended in time; then the communicator is aborted."""
        background_errors.watch(self)

    @classmethod
    def join(
        cls,
        token: bytes,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
        news: threading.Event | None = None,
    ) -> CclTransport:
        """Join by an invitation's token; blocks until all ranks are there.

        Args:
            news: this function sets it; whoever else does makes it give up waiting.

        Raises:
            CollectiveError: they are not after ``timeout_s`` seconds. The library offers no safe way to take back a
                rank that waits for a missing peer: its thread is left behind and gives up what it gets later.
        """
        import torch

        from monarch_slurm.gpu.libraries import ccl_library, native

        ccl = ccl_library()
        init = native().Comm.init
        outcome: list[Any] = []
        lock = threading.Lock()
        ready = news or threading.Event()
        abandoned = False

        def run() -> None:
            try:
                torch.get_device_module(device).set_device(device)
                made = init(ccl, token, size, rank)
            except BaseException as error:  # the joining thread gets it
                made = error
            with lock:
                outcome.append(made)
                if abandoned and not isinstance(made, BaseException):
                    made.abort("nobody waits for this communicator any more")
            ready.set()

        start_thread(threading.Thread(target=run, name=f"ccl-join-{rank}", daemon=True))
        ready.wait(timeout_s)
        with lock:
            if not outcome:
                abandoned = True
                raise CollectiveError(
                    f"rank {rank} waited {timeout_s} s for {size} ranks to join; a peer is missing or unreachable"
                )
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return cls(outcome[0], device)

    def split(self, name: str, members: Sequence[int] | None, color: int) -> CclTransport | None:
        """Make a communicator of ``members``; every rank of this one calls, those left out with None."""
        del name
        with self._torch.cuda.device(self._device):
            if members is None:
                self.comm.split(-1, 0, 0, 0)
                return None
            at = members.index(self.rank)
            return CclTransport(self.comm.split(color, at, len(members), at), self._device)

    def all_reduce(self, tensor: torch.Tensor, op: str) -> Work:
        """Reduce in place."""
        at = tensor.data_ptr()
        self.comm.all_reduce(at, at, tensor.numel(), _type(tensor), OPS.index(op), self._stream())
        return self._work("all_reduce")

    def reduce(self, tensor: torch.Tensor, root: int, op: str) -> Work:
        """Reduce to ``root``; what others hold afterwards is their own input."""
        at = tensor.data_ptr()
        self.comm.reduce(at, at, tensor.numel(), _type(tensor), OPS.index(op), root, self._stream())
        return self._work("reduce")

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, op: str) -> Work:
        """Reduce and give each rank its part."""
        ends = (source.data_ptr(), output.data_ptr(), output.numel())
        self.comm.reduce_scatter(*ends, _type(source), OPS.index(op), self._stream())
        return self._work("reduce_scatter")

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """Copy ``root``'s tensor to all."""
        at = tensor.data_ptr()
        self.comm.broadcast(at, at, _bytes(tensor), _BYTE, root, self._stream())
        return self._work("broadcast")

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Work:
        """Concatenate all ranks' tensors."""
        self.comm.all_gather(source.data_ptr(), output.data_ptr(), _bytes(source), _BYTE, self._stream())
        return self._work("all_gather")

    def all_to_all(
        self, output: torch.Tensor, source: torch.Tensor, output_counts: Sequence[int], input_counts: Sequence[int]
    ) -> Work:
        """Exchange parts; counts are in elements. Made of one group of sends and receives, as the libraries' own is."""
        width, stream = source.element_size(), self._stream()
        sent, received = source.data_ptr(), output.data_ptr()
        self.comm.group_start()
        try:
            for peer in range(self.size):
                self.comm.send(sent, input_counts[peer] * width, _BYTE, peer, stream)
                self.comm.recv(received, output_counts[peer] * width, _BYTE, peer, stream)
                sent += input_counts[peer] * width
                received += output_counts[peer] * width
        finally:
            self.comm.group_end()
        return self._work("all_to_all")

    def send(self, tensor: torch.Tensor, peer: int) -> Work:
        """Send to ``peer``."""
        self.comm.send(tensor.data_ptr(), _bytes(tensor), _BYTE, peer, self._stream())
        return self._work("send")

    def recv(self, tensor: torch.Tensor, peer: int) -> Work:
        """Receive from ``peer``."""
        self.comm.recv(tensor.data_ptr(), _bytes(tensor), _BYTE, peer, self._stream())
        return self._work("recv")

    def barrier(self) -> Work:
        """Order every rank's stream behind all others'."""
        if self._barrier_flag is None:
            self._barrier_flag = self._torch.zeros(1, dtype=self._torch.uint8, device=self._device)
        return self.all_reduce(self._barrier_flag, "max")

    def group_start(self) -> None:
        """Let the library collect operations until `group_end`."""
        self.comm.group_start()

    def group_end(self) -> Work:
        """Start what was collected, as one kernel."""
        self.comm.group_end()
        return self._work("group")

    def abort(self, failure: BaseException) -> None:
        """End the kernels that run, and fail all that comes."""
        if self._end(failure):
            # The library takes half a second to end its threads: waiters are told, and a new communicator is made,
            # without waiting for that. Not a daemon: the interpreter must not end in the middle of it.
            start_thread(threading.Thread(target=self.comm.abort, args=(str(failure),), name="ccl-abort"))

    def close(self, failure: BaseException) -> None:
        """Wait for what was started, then end."""
        if self._failure is not None:
            return
        self._torch.cuda.synchronize(self._device)
        if self._end(failure):
            self.comm.destroy()
        else:  # aborted meanwhile: what was started has ended, but is not through
            self._raise_failure()

    def failure(self) -> BaseException | None:
        """Return why the communicator has ended, None while it lives."""
        return self._failure

    def _end(self, failure: BaseException) -> bool:
        """Refuse what comes; returns False where it had ended before."""
        with self._lock:
            if self._failure is not None:
                return False
            self._failure = failure
            return True

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _stream(self) -> int:
        self._raise_failure()
        stream: int = self._torch.cuda.current_stream(self._device).cuda_stream
        return stream

    def _work(self, name: str) -> Work:
        return DeviceWork(name, self._torch.cuda.current_stream(self._device), self.failure)


_BYTE = CCL_DTYPES["uint8"]


def _type(tensor: torch.Tensor) -> int:
    return CCL_DTYPES[dtype_name(tensor)]


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
