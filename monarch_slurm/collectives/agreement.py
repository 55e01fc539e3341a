"""Ranks compare what they are about to do before gloo moves data.

gloo checks sizes while data arrives, on a thread of its own, and ends the process when they differ. So every operation
first exchanges a record of fixed size; a difference raises `CollectiveError` on all ranks, nothing has been sent, and
the communicator stays usable. The exchange costs one small message to and from the neighbours of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monarch_slurm.collectives.checks import OPS, dtype_name
from monarch_slurm.collectives.errors import CollectiveError

if TYPE_CHECKING:
    import torch

OPERATIONS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier")

DTYPES = (
    "another dtype", "float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "uint16", "int32", "uint32",
    "int64", "uint64", "bool", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
"""Names of dtypes, in the order of the numbers that ranks exchange."""

_DATA, _HEADER = 0, 1
"""Tags of gloo's messages between two ranks."""


@dataclass(frozen=True)
class Plan:
    """What one rank is about to do.

    Attributes:
        operation: one of `OPERATIONS`.
        dtype: number of the tensor's dtype in `DTYPES`; -1 without a tensor.
        itemsize: bytes of an element; 0 without a tensor.
        numel: elements that must be the same on all ranks; -1 without such a number.
        root: rank of the root; -1 without one.
        op: number of the reduction in `OPS`; -1 without one.
    """

    operation: int
    dtype: int = -1
    itemsize: int = 0
    numel: int = -1
    root: int = -1
    op: int = -1

    @classmethod
    def of(
        cls, operation: str, tensor: torch.Tensor | None = None, *, numel: int = -1, root: int = -1, op: str = ""
    ) -> Plan:
        """Return the plan of an operation on ``tensor``."""
        dtype, itemsize = (-1, 0) if tensor is None else (_dtype_number(tensor), tensor.element_size())
        return cls(OPERATIONS.index(operation), dtype, itemsize, numel, root, OPS.index(op) if op else -1)

    def to_list(self) -> list[int]:
        """Return the numbers that ranks exchange."""
        return [self.operation, self.dtype, self.itemsize, self.numel, self.root, self.op]

    def __str__(self) -> str:
        parts = [OPERATIONS[self.operation]]
        if self.numel >= 0:
            parts.append(f"of {self.numel} elements")
        if self.dtype >= 0:
            parts.append(f"of {DTYPES[self.dtype]}")
        if self.op >= 0:
            parts.append(f"({OPS[self.op]})")
        if self.root >= 0:
            parts.append(f"with root {self.root}")
        return " ".join(parts)


def agree(group: Any, size: int, plan: Plan) -> None:
    """Exchange plans with all ranks; blocks until every rank has called it.

    Args:
        group: gloo's process group.
        size: number of ranks.
        plan: what this rank is about to do.

    Raises:
        CollectiveError: the ranks differ; the text names two of them and what each is about to do.
    """
    plans = [Plan(*numbers) for numbers in _exchange(group, size, plan.to_list())]
    for rank, other in enumerate(plans):
        if other != plans[0]:
            raise CollectiveError(
                f"the ranks of the communicator differ: rank 0 calls {plans[0]}, rank {rank} calls {other}. "
                "Nothing was sent; call the same operation with the same size and dtype on every rank"
            )


def agree_on_counts(group: Any, size: int, received: Sequence[int], sent: Sequence[int]) -> None:
    """Check on all ranks that each expects as many elements as the other sends; blocks until all have called it.

    Args:
        group: gloo's process group.
        size: number of ranks.
        received: elements expected from each rank.
        sent: elements for each rank.

    Raises:
        CollectiveError: two ranks differ; the text names them.
    """
    every = _exchange(group, size, [*received, *sent])
    for receiver in range(size):
        for sender in range(size):
            expects, sends = every[receiver][sender], every[sender][size + receiver]
            if expects != sends:
                raise CollectiveError(
                    f"the ranks of the communicator differ: rank {sender} sends {sends} elements to rank {receiver}, "
                    f"which expects {expects}. Nothing was sent"
                )


class PendingSend:
    """A send that has been started: its header, then its data."""

    def __init__(self, group: Any, tensor: torch.Tensor, raw: torch.Tensor, peer: int) -> None:
        self._header = _tensor(_header(tensor))
        self._works = [group.send([self._header], peer, _HEADER), group.send([raw], peer, _DATA)]

    def meet(self) -> None:
        """Do nothing: a receiver takes what comes."""

    def wait(self) -> None:
        """Wait until all was sent."""
        for work in self._works:
            work.wait()


class PendingReceive:
    """A receive that has been started: its header, then (`meet`) its data.

    What does not fit is received into memory of its own and dropped, so that the peers stay in step.
    """

    def __init__(self, group: Any, tensor: torch.Tensor, raw: torch.Tensor, rank: int, peer: int) -> None:
        self._group = group
        self._raw = raw
        self._expected = _header(tensor)
        self._ranks = rank, peer
        self._header = _tensor([0, 0, 0])
        self._work: Any = group.recv([self._header], peer, _HEADER)
        self._error: CollectiveError | None = None

    def meet(self) -> None:
        """Wait for the header, then start to receive the data."""
        import torch

        self._work.wait()
        sent = self._header.tolist()
        rank, peer = self._ranks
        if sent != self._expected:
            self._error = CollectiveError(
                f"rank {peer} sends {sent[1]} elements of {DTYPES[sent[0]]} to rank {rank}, which expects "
                f"{self._expected[1]} of {DTYPES[self._expected[0]]}; the data was dropped"
            )
            self._raw = torch.empty(sent[1] * sent[2], dtype=torch.uint8)
        self._work = self._group.recv([self._raw], peer, _DATA)

    def wait(self) -> None:
        """Wait until the data is here.

        Raises:
            CollectiveError: it has another size or dtype than expected.
        """
        self._work.wait()
        if self._error is not None:
            raise self._error


Pending = PendingSend | PendingReceive


def complete(starts: Sequence[Callable[[], Pending]]) -> None:
    """Start sends and receives, all before any is waited for, and wait for all of them.

    Raises:
        CollectiveError: one receive does not fit what was sent.
    """
    pending = [start() for start in starts]
    for one in pending:
        one.meet()
    errors = []
    for one in pending:
        try:
            one.wait()
        except CollectiveError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _exchange(group: Any, size: int, numbers: list[int]) -> list[list[int]]:
    mine = _tensor(numbers)
    every = mine.new_empty(size * len(numbers))
    group._allgather_base(every, mine).wait()
    rows: list[list[int]] = every.view(size, -1).tolist()
    return rows


def _tensor(numbers: Sequence[int]) -> torch.Tensor:
    import torch

    return torch.tensor(numbers, dtype=torch.int64)


def _dtype_number(tensor: torch.Tensor) -> int:
    name = dtype_name(tensor)
    return DTYPES.index(name) if name in DTYPES else 0


def _header(tensor: torch.Tensor) -> list[int]:
    """Dtype, elements, bytes of an element."""
    return [_dtype_number(tensor), tensor.numel(), tensor.element_size()]
