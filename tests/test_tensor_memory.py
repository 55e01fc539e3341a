"""Tensors without memory of their own, or with other values in it, are refused with what to do instead."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

from monarch_slurm.rdma import RDMAAction, RDMABuffer
from monarch_slurm.rdma.memory import memory_of
from monarch_slurm.tensor_memory import check_memory


@pytest.fixture
def sharded() -> Iterator[DTensor]:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        yield DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (2,)), [Shard(0)])
    finally:
        dist.destroy_process_group()


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(10)


def resized(nbytes: int) -> torch.Tensor:
    tensor = torch.ones(10)[5:]
    tensor.untyped_storage().resize_(nbytes)
    return tensor


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), r"resolve_conj"),
        (lambda: torch._neg_view(torch.ones(3)), r"resolve_neg"),
        (fake, "real tensor"),
        (lambda: TwoTensor(torch.ones(3), torch.ones(3)), r"use those \(a, b\)"),
        (lambda: torch._efficientzerotensor(3), "no memory of its own"),
        (lambda: resized(0), "reaches to byte 40 of a storage of 0"),
        (lambda: resized(28), "reaches to byte 40 of a storage of 28"),
    ],
)
def test_what_has_not_its_values_in_memory(make: Callable[[], Any], text: str) -> None:
    tensor = make()
    with pytest.raises(ValueError, match=text):
        check_memory("the source", tensor)
    with pytest.raises(ValueError, match=text):
        memory_of(tensor)


def test_shards_are_named(sharded: DTensor) -> None:
    with pytest.raises(ValueError, match=r"is a DTensor; use \.to_local"):
        RDMABuffer(sharded)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="no RDMA device")
        buffer = RDMABuffer(torch.ones(6))
    with pytest.raises(ValueError, match=r"is a DTensor; use \.to_local"):
        RDMAAction().read_remote(sharded, buffer)
    with pytest.raises(ValueError, match=r"is a DTensor; use \.to_local"):
        RDMAAction().write_remote(buffer, sharded)
    assert memory_of(sharded.to_local()).nbytes == 12
    buffer.drop().get(10)


def test_transformed_functions() -> None:
    def inside(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(ValueError, match="no memory of its own"):
            check_memory("the source", tensor)
        return tensor.sum()

    torch.vmap(inside)(torch.ones(3, 4))
    torch.func.grad(inside)(torch.ones(4))
    torch.func.functionalize(lambda tensor: inside(tensor + 1))(torch.ones(4))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(0),
        torch.ones(4)[2:],
        torch.ones(3, dtype=torch.complex64).conj().resolve_conj(),
    ],
)
def test_what_has(tensor: torch.Tensor) -> None:
    check_memory("the source", tensor)
