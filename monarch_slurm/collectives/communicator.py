"""One rank's end of a communicator, with every operation. The same on GPUs and CPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from monarch_slurm.collectives.checks import (
    check_counts,
    check_groups,
    check_peer,
    check_rank,
    check_ranks,
    check_reduction,
    check_same,
    check_tensor,
)
from monarch_slurm.collectives.errors import CommunicatorClosedError, PeerLostError
from monarch_slurm.collectives.rendezvous import Invitation
from monarch_slurm.collectives.work import Work

if TYPE_CHECKING:
    import torch

    from monarch_slurm.collectives.mesh import MeshCommunicator

JOIN_TIMEOUT_S = 120.0


class Communicator:
    """Ranks that exchange tensors. Make one with `create` on a mesh, or with `join` and an invitation.

    Every rank must call the same operations in the same order with fitting arguments. On a GPU an operation is enqueued
    on the current stream of the calling thread and returns at once; what is enqueued there later sees its result, and
    it can be captured in a CUDA or HIP graph. On CPUs a thread runs the operations in order; call `Work.wait` before
    the result is read. Until then the tensors must be left alone.

    Tensors are contiguous, on `device`, and have their values in memory of their own: no DTensors, no conjugated or
    negated views. ``op`` is ``sum``, ``prod``, ``max``, ``min`` or ``avg``. Wrong arguments raise ValueError or
    TypeError on this rank before anything is sent. After an abort every call raises `PeerLostError`.
    """

    def __init__(self, transport: Any, device: torch.device) -> None:
        self._transport = transport
        self._device = device
        self._made = 0

    @classmethod
    def create(
        cls,
        mesh: Any,
        dims: Sequence[str] | None = None,
        *,
        backend: str | None = None,
        timeout_s: float = JOIN_TIMEOUT_S,
    ) -> MeshCommunicator:
        """Make communicators over dimensions of a mesh of procs, from the program that owns the mesh.

        Args:
            mesh: a ``ProcMesh``.
            dims: which dimensions one communicator spans; there is one for each place in the others. None: all.
            backend: ``ccl`` for GPUs, ``gloo`` for CPUs; None: ``ccl`` where a GPU platform is found.
            timeout_s: seconds that the ranks may take to find each other.

        Returns:
            A handle that actors of the mesh can be given; ``handle.local()`` there is the proc's `Communicator`.
        """
        from monarch_slurm.collectives.mesh import MeshCommunicator

        return MeshCommunicator.create(mesh, dims, backend=backend, timeout_s=timeout_s)

    @classmethod
    def join(
        cls,
        invitation: Invitation,
        rank: int,
        size: int,
        *,
        device: str | torch.device | None = None,
        timeout_s: float = JOIN_TIMEOUT_S,
    ) -> Communicator:
        """Join a new communicator; blocks until all ``size`` ranks have.

        Args:
            invitation: what one rank's `invite` made.
            rank: this process's place, from 0.
            size: number of ranks.
            device: where the tensors lie; None: the current GPU, or the CPU for gloo.
            timeout_s: seconds to wait for the others.

        Raises:
            CollectiveError: a peer did not come, or one that has not this invitation came in its place.
            MonarchSlurmError: RCCL or NCCL is not there or refuses.
        """
        import torch

        if not isinstance(invitation, Invitation):
            raise TypeError(f"invitation is a {type(invitation).__name__}; what invite() returns first is expected")
        check_rank("rank", rank, size)
        if invitation.backend == "gloo":
            from monarch_slurm.collectives.gloo import GlooTransport

            return cls(GlooTransport.join(invitation, rank, size, timeout_s), torch.device("cpu"))
        from monarch_slurm.collectives.ccl import CclTransport

        place = torch.device(device) if device is not None else torch.device("cuda")
        if place.index is None:
            place = torch.device("cuda", torch.cuda.current_device())
        return cls(CclTransport.join(invitation.token, rank, size, place, timeout_s), place)

    @property
    def rank(self) -> int:
        """This process's place, from 0."""
        return int(self._transport.rank)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return int(self._transport.size)

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self._device

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> Work:
        """Replace every rank's tensor by the reduction of all, element by element; any shape, the same on all ranks."""
        self._check("tensor", tensor)
        self._check_op(op, tensor)
        work: Work = self._transport.all_reduce(tensor, op)
        return work

    def reduce(self, tensor: torch.Tensor, root: int = 0, op: str = "sum") -> Work:
        """Replace ``root``'s tensor by the reduction of all; the other ranks' stay as they are."""
        self._check("tensor", tensor)
        self._check_op(op, tensor)
        check_rank("root", root, self.size)
        work: Work = self._transport.reduce(tensor, root, op)
        return work

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        """Replace every rank's tensor by ``root``'s; any dtype."""
        self._check("tensor", tensor)
        check_rank("root", root, self.size)
        work: Work = self._transport.broadcast(tensor, root)
        return work

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Work:
        """Put all ranks' ``source``, one after another, into ``output``, which has ``size`` times its elements."""
        self._check("output", output)
        self._check("source", source)
        check_same("output", output, source, source.numel() * self.size)
        work: Work = self._transport.all_gather(output, source)
        return work

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, op: str = "sum") -> Work:
        """Reduce all ranks' ``source`` and put this rank's part, one of ``size`` equal ones, into ``output``."""
        self._check("output", output)
        self._check("source", source)
        self._check_op(op, source)
        check_same("source", source, output, output.numel() * self.size)
        work: Work = self._transport.reduce_scatter(output, source, op)
        return work

    def all_to_all(self, output: torch.Tensor, source: torch.Tensor) -> Work:
        """Send part ``i`` of ``source`` to rank ``i``, whose parts come in rank order; ``size`` equal parts."""
        self._check("output", output)
        self._check("source", source)
        if source.numel() % self.size:
            raise ValueError(
                f"source has {source.numel()} elements, which do not divide by {self.size}; use all_to_all_v"
            )
        counts = [source.numel() // self.size] * self.size
        return self.all_to_all_v(output, source, counts, counts)

    def all_to_all_v(
        self, output: torch.Tensor, source: torch.Tensor, output_counts: Sequence[int], input_counts: Sequence[int]
    ) -> Work:
        """Like `all_to_all` with parts of any size: numbers of elements from and to each rank."""
        self._check("output", output)
        self._check("source", source)
        check_counts("output_counts", output_counts, self.size)
        check_counts("input_counts", input_counts, self.size)
        check_same("output", output, source, sum(output_counts))
        check_same("source", source, output, sum(input_counts))
        work: Work = self._transport.all_to_all(output, source, output_counts, input_counts)
        return work

    def gather(self, output: torch.Tensor | None, source: torch.Tensor, root: int = 0) -> Work:
        """Put all ranks' ``source``, one after another, into ``root``'s ``output``; the other ranks give None."""
        self._check("source", source)
        check_rank("root", root, self.size)
        counts = [0] * self.size
        counts[root] = source.numel()
        return self._rooted("output", output, source, counts, root, gathering=True)

    def scatter(self, output: torch.Tensor, source: torch.Tensor | None, root: int = 0) -> Work:
        """Put part ``i`` of ``root``'s ``source`` into rank ``i``'s ``output``; the other ranks give None."""
        self._check("output", output)
        check_rank("root", root, self.size)
        counts = [0] * self.size
        counts[root] = output.numel()
        return self._rooted("source", source, output, counts, root, gathering=False)

    def send(self, tensor: torch.Tensor, peer: int) -> Work:
        """Send to ``peer``, which calls `recv`; any dtype. Two ranks that send to each other need a `group`."""
        self._check("tensor", tensor)
        check_peer(peer, self.rank, self.size)
        work: Work = self._transport.send(tensor, peer)
        return work

    def recv(self, tensor: torch.Tensor, peer: int) -> Work:
        """Receive what ``peer`` sends, which has as many elements of the same dtype."""
        self._check("tensor", tensor)
        check_peer(peer, self.rank, self.size)
        work: Work = self._transport.recv(tensor, peer)
        return work

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Start the sends and receives of the ``with`` block together, whatever their order."""
        self._transport.group_start()
        try:
            yield
        finally:
            self._transport.group_end()

    def barrier(self) -> Work:
        """Complete when every rank has called it."""
        work: Work = self._transport.barrier()
        return work

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator | None:
        """Make communicators of parts of this one; every rank calls with the same ``groups``.

        Args:
            groups: ranks of this communicator, each in one list at most; a list's order gives the new ranks.

        Returns:
            This rank's new communicator; None when it is in no list.
        """
        check_groups(groups, self.size)
        self._made += 1
        for color, members in enumerate(groups):
            if self.rank in members:
                made = self._transport.split(f"split{self._made}.{color}", list(members), color)
                return Communicator(made, self._device)
        self._transport.split("", None, -1)
        return None

    def shrink(self, leaving: Sequence[int]) -> Communicator | None:
        """Make a communicator without some ranks, which are alive and call too; they get None.

        When ranks are dead use `MeshCommunicator.remake`.

        Raises:
            ValueError: a rank is not there.
        """
        check_ranks("leaving", leaving, self.size)
        return self.split([[rank for rank in range(self.size) if rank not in leaving]])

    def abort(self, reason: str, rank: int | None = None) -> None:
        """End every operation of this rank now, from any thread; waiters and later calls raise `PeerLostError`.

        Args:
            reason: what is known; becomes part of the error.
            rank: the rank that is lost, if one is to blame.
        """
        self._transport.abort(PeerLostError(reason, rank))

    def close(self) -> None:
        """Wait for what was started, then free the communicator; every rank calls it. After an abort does nothing.

        Raises:
            PeerLostError: the communicator was aborted while this waited.
            TimeoutError: gloo was not through within the ``timeout_s`` of joining.
        """
        self._transport.close(CommunicatorClosedError("the communicator was closed"))

    def _rooted(
        self,
        what: str,
        whole: torch.Tensor | None,
        part: torch.Tensor,
        counts: list[int],
        root: int,
        *,
        gathering: bool,
    ) -> Work:
        each = [part.numel()] * self.size if self.rank == root else [0] * self.size
        if self.rank == root:
            if whole is None:
                raise ValueError(f"{what} is None on rank {root}, which is the root")
            self._check(what, whole)
            check_same(what, whole, part, part.numel() * self.size)
        elif whole is not None:
            raise ValueError(f"{what} must be None on rank {self.rank}, which is not the root")
        else:
            whole = part[:0] if part.dim() else part.view(1)[:0]
        buffers, received, sent = (whole, part), each, counts
        if not gathering:
            buffers, received, sent = (part, whole), counts, each
        work: Work = self._transport.all_to_all(*buffers, received, sent)
        return work

    def _check(self, what: str, tensor: torch.Tensor) -> None:
        check_tensor(what, tensor, self._device)

    def _check_op(self, op: str, tensor: torch.Tensor) -> None:
        check_reduction(op, tensor, self._transport.reducible, self._transport.library)

    def __repr__(self) -> str:
        return (
            f"Communicator(rank={self.rank}, size={self.size}, device={self._device}, over={self._transport.library})"
        )
