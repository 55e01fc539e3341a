"""Which local memory stays registered: allocations, once each, while their object lives and there is room."""

from __future__ import annotations

import array
import gc
import mmap
from typing import Any

import pytest
import torch

from monarch_slurm.rdma.errors import RegistrationError
from monarch_slurm.rdma.memory import Memory, memory_of
from monarch_slurm.rdma.registration import RegistrationCache

Made = list[tuple[int, int, bool]]


@pytest.fixture
def made() -> Made:
    return []


def cache_of(made: Made, limit: int = 2**30, largest: int = 2**30) -> RegistrationCache:
    def register(address: int, nbytes: int, write: bool, *_: Any) -> object:
        if nbytes > largest:
            raise RegistrationError("too much")
        made.append((address, nbytes, write))
        return object()

    return RegistrationCache(register, limit)


def get(cache: RegistrationCache, memory: Memory, write: bool = False) -> object:
    region: object = cache.get(memory.address, memory.nbytes, write, memory.anchor)
    return region


def test_slices_and_directions_share_what_their_tensor_has(made: Made) -> None:
    cache, tensor = cache_of(made), torch.zeros(1000)
    regions = {
        id(get(cache, memory_of(tensor[i : i + 4]), write)) for i in range(0, 1000, 4) for write in (True, False)
    }
    assert len(regions) == 1
    assert made == [(tensor.data_ptr(), 4000, True)]
    assert (cache.nbytes, cache.hits) == (4000, 499)


@pytest.mark.parametrize("data", [mmap.mmap(-1, 8192), array.array("B", bytes(8192)), torch.zeros(8192).numpy()])
def test_slices_of_views(made: Made, data: Any) -> None:
    cache, view = cache_of(made), memoryview(data)
    for start in (0, 4096, 100):
        get(cache, memory_of(view[start : start + 50]))
    assert [(nbytes, write) for _, nbytes, write in made] == [(view.nbytes, True)]


def test_what_cannot_tell_that_it_dies_is_registered_each_time(made: Made) -> None:
    cache, data = cache_of(made), bytearray(100)
    for _ in range(2):
        get(cache, memory_of(memoryview(data)))
    assert len(made) == 2
    assert len(cache) == 0
    data.clear()  # nothing holds it


def test_they_go_with_their_object(made: Made) -> None:
    cache, tensor, other = cache_of(made), torch.zeros(1000), torch.zeros(10)
    get(cache, memory_of(tensor[:5]))
    get(cache, memory_of(other))
    part = tensor[5:]
    del tensor
    gc.collect()
    assert len(cache) == 2, "its storage lives"
    del part
    gc.collect()
    assert (len(cache), cache.nbytes) == (1, 40)


def test_the_oldest_go_when_there_is_no_room(made: Made) -> None:
    cache, tensors = cache_of(made, limit=1000), [torch.zeros(100) for _ in range(3)]
    for index in (0, 1, 0, 2):
        get(cache, memory_of(tensors[index]))
    assert (len(cache), cache.nbytes) == (2, 800)
    get(cache, memory_of(tensors[0]))
    assert len(made) == 3, "the one used last stays"


def test_an_allocation_that_the_device_does_not_take_is_taken_in_parts(made: Made) -> None:
    cache, tensor = cache_of(made, largest=500), torch.zeros(1000)
    for write in (True, True, False):
        get(cache, memory_of(tensor[4:8]), write)
    assert made == [(tensor.data_ptr() + 16, 16, True), (tensor.data_ptr() + 16, 16, False)]
    with pytest.raises(RegistrationError):
        get(cache, memory_of(tensor))
    small = cache_of(made, limit=100)
    get(small, memory_of(tensor[:2]))
    assert made[-1] == (tensor.data_ptr(), 8, False), "one that is larger than all that may stay"
    del tensor
    gc.collect()
    assert cache._refused == set()


def test_a_storage_that_was_resized_is_registered_anew(made: Made) -> None:
    cache, tensor = cache_of(made), torch.zeros(1000)
    get(cache, memory_of(tensor))
    tensor.untyped_storage().resize_(8000)
    get(cache, memory_of(tensor))
    assert [nbytes for _, nbytes, _ in made] == [4000, 8000]
