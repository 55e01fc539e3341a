"""What is refused before anything is sent: a wrong tensor on one rank would hang or harm the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, SupportsIndex

from monarch_slurm.tensor_memory import check_memory

if TYPE_CHECKING:
    import torch

OPS = ("sum", "prod", "max", "min", "avg")
"""Reductions, in the order of NCCL's codes."""

CCL_DTYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
    "float8_e4m3fn": 10,
    "float8_e5m2": 11,
}
"""NCCL's codes of torch's dtypes."""

GLOO_DTYPES = frozenset({"int8", "uint8", "int32", "int64", "float16", "float32", "float64", "bfloat16"})
"""What gloo can reduce."""


def dtype_name(tensor: torch.Tensor) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def check_tensor(what: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Refuse what is no tensor, not contiguous or on another device, and a tensor whose memory is not its values.

    Raises:
        TypeError: it is no tensor.
        ValueError: it is one of the others.
    """
    if not hasattr(tensor, "is_contiguous"):
        raise TypeError(f"{what} is a {type(tensor).__name__}; a torch.Tensor is needed")
    if tensor.device != device:
        raise ValueError(
            f"{what} is on {tensor.device}, the communicator on {device}; move it with .to({str(device)!r})"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"{what} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous; use .contiguous()"
        )
    check_memory(what, tensor)


def check_reduction(op: str, tensor: torch.Tensor, dtypes: frozenset[str], library: str) -> None:
    """Refuse a reduction that does not exist or that the library cannot do on the dtype.

    Raises:
        ValueError: no such reduction.
        TypeError: the dtype cannot be reduced so.
    """
    if op not in OPS:
        raise ValueError(f"reduction {op!r}: one of {', '.join(OPS)} expected")
    if dtype_name(tensor) not in dtypes:
        raise TypeError(f"{library} cannot reduce {tensor.dtype}; it can {', '.join(sorted(dtypes))}")
    if op == "avg" and not tensor.is_floating_point():
        raise TypeError(f"avg of {tensor.dtype} would not be whole; use sum, or a floating-point dtype")


def check_same(what: str, tensor: torch.Tensor, other: torch.Tensor, numel: int) -> None:
    """Refuse a pair of buffers that do not fit: ``tensor`` must have ``numel`` elements of ``other``'s dtype.

    Raises:
        TypeError: the dtypes differ.
        ValueError: the sizes do not fit.
    """
    if tensor.dtype != other.dtype:
        raise TypeError(f"{what} is {tensor.dtype}, but the other buffer is {other.dtype}")
    if tensor.numel() != numel:
        raise ValueError(f"{what} has {tensor.numel()} elements; {numel} are needed")


def check_rank(what: str, rank: int, size: int) -> None:
    """Refuse a rank that the communicator does not have.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is out of range.
    """
    if not _is_integer(rank):
        raise TypeError(f"{what} is a {type(rank).__name__}; a rank from 0 to {size - 1} expected")
    if not 0 <= rank < size:
        raise ValueError(f"{what} {rank}: a rank from 0 to {size - 1} expected")


def check_peer(peer: int, rank: int, size: int) -> None:
    """Refuse a peer that is not there or is the rank itself.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is so.
    """
    check_rank("peer", peer, size)
    if peer == rank:
        raise ValueError(f"peer {peer} is this rank itself; copy the tensor instead")


def check_counts(what: str, counts: Sequence[int], size: int) -> None:
    """Refuse what is not one number of elements for each rank.

    Raises:
        TypeError: it is not a sequence of integers.
        ValueError: their number is not ``size``, or one is negative.
    """
    if not _is_collection(counts) or not all(map(_is_integer, counts)):
        raise TypeError(f"{what} {counts!r}: a list of {size} integers expected")
    if len(counts) != size or min(counts) < 0:
        raise ValueError(f"{what} {list(counts)}: {size} numbers of at least 0 expected")


def check_ranks(what: str, ranks: Collection[int], size: int) -> None:
    """Refuse what is not a collection of ranks that the communicator has.

    Raises:
        TypeError: it is not a collection of integers.
        ValueError: a rank is out of range.
    """
    if not _is_collection(ranks):
        raise TypeError(f"{what} is a {type(ranks).__name__}; a list of ranks from 0 to {size - 1} expected")
    for rank in ranks:
        check_rank(f"a rank of {what}", rank, size)


def check_groups(groups: Sequence[Sequence[int]], size: int) -> None:
    """Refuse what is not lists of ranks, each rank in one of them at most.

    Raises:
        TypeError: it is not a sequence of sequences of integers.
        ValueError: a rank is out of range or in two lists.
    """
    if not _is_collection(groups):
        raise TypeError(f"groups is a {type(groups).__name__}; lists of ranks expected, such as [[0, 1], [2, 3]]")
    for members in groups:
        check_ranks("groups", members, size)
    ranks = [rank for members in groups for rank in members]
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"groups {[list(members) for members in groups]}: a rank is in two of them")


def _is_integer(value: object) -> bool:
    return isinstance(value, SupportsIndex) and not isinstance(value, bool) and not hasattr(value, "is_contiguous")


def _is_collection(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)
