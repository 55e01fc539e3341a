from __future__ import annotations

import gc
import os
import pickle
import resource
import struct
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import DEADLINE, wait_until

from monarch_slurm.wire import dumps, large_buffers, loads, memory_files
from monarch_slurm.wire.bulk import BULK_BYTES, Bulk, in_place
from monarch_slurm.wire.large_buffers import Buffer, Incoming, Kind, Outgoing
from monarch_slurm.wire.memory_files import MemoryPool, own_memory
from monarch_slurm.wire.pickling import OUT_OF_BAND_BYTES

MAPPED_BYTES = 33 * 2**20
"""glibc gives objects of this size pages of their own, whatever has been allocated before."""


def cut(frames: list[Buffer], size: int) -> list[Buffer]:
    """The frames as they arrive from another machine: the first whole, the others in pieces of plain bytes."""
    head, *rest = [bytes(in_place(frame)) for frame in frames]
    return [head, *(frame[at : at + size] for frame in rest for at in range(0, len(frame), size))]


sizes = st.sampled_from(
    [0, 1, OUT_OF_BAND_BYTES - 1, OUT_OF_BAND_BYTES, 100_003, BULK_BYTES - 1, BULK_BYTES, 3_000_001]
)
fills = st.sampled_from([b"\x95", b"\x00", b"x", b"\x95" + struct.pack("<Q", OUT_OF_BAND_BYTES - 9)])
leaves = (
    st.builds(lambda size, fill: (fill * size)[:size], sizes, fills)
    | st.builds(lambda size, fill: bytearray((fill * size)[:size]), sizes, fills)
    | st.builds(lambda size, fill: (fill * size)[:size], sizes, st.sampled_from(["x", "é", "\ud800", "a\u20ac"]))
    | st.builds(lambda size: list(range(size // 100)), sizes)
    | st.builds(lambda size: int.from_bytes(b"\x7f" * size, "big"), st.sampled_from([3, OUT_OF_BAND_BYTES]))
    | st.builds(lambda size: np.arange(size, dtype=np.uint8), sizes)
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=4,
)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


@settings(max_examples=25, deadline=None)
@given(values, st.integers(1000, 2**21))
def test_values_with_much_in_them_come_out_as_they_went_in(value: Any, piece: int) -> None:
    frames = dumps(value)
    assert same(loads(frames), value)
    assert same(loads(cut(frames, piece)), value)
    assert len(in_place(frames[0])) < 2 * OUT_OF_BAND_BYTES


@pytest.mark.parametrize("size", [OUT_OF_BAND_BYTES, BULK_BYTES + 1, MAPPED_BYTES + 7])
def test_what_is_large_is_not_in_the_pickle(size: int) -> None:
    value = {"bytes": b"x" * size, "array": bytearray(b"y" * size), "text": "z" * size, "other": "é" * size}
    frames = dumps((([value],), {}))
    assert len(in_place(frames[0])) < 1000
    for got in (loads(frames)[0][0][0], loads(cut(frames, 2**20))[0][0][0]):
        assert got == value
        assert {key: type(part) for key, part in got.items()} == {key: type(part) for key, part in value.items()}


def test_the_same_object_twice_is_one() -> None:
    text, data = "x" * BULK_BYTES, b"y" * BULK_BYTES
    frames = dumps([text, data, text, data])
    assert sum(map(len, frames)) < 3 * BULK_BYTES
    one, two, three, four = loads(frames)
    assert one is three
    assert two is four


def maps() -> int:
    gc.collect()
    with open("/proc/self/maps") as file:
        return sum("memfd:monarch_slurm" in line for line in file)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> MemoryPool:
    made = MemoryPool()
    monkeypatch.setattr(memory_files, "_pool", made)
    return made


def test_large_objects_are_maps_that_end_with_them(pool: MemoryPool) -> None:
    before = maps()
    frames = dumps([b"x" * MAPPED_BYTES, bytearray(b"y" * MAPPED_BYTES), "z" * MAPPED_BYTES])
    got = loads(frames)
    copied = [b"x" * MAPPED_BYTES, bytearray(b"y" * MAPPED_BYTES), "z" * MAPPED_BYTES]
    assert maps() > before, "glibc has mapped them"
    got[1] += b"more"  # what grows is moved
    got[1][0] = 1
    del got[1][:5]
    copied[1] = bytearray(b"y" * (MAPPED_BYTES - 5) + b"more")
    assert got == copied
    assert loads(frames)[1] == b"y" * MAPPED_BYTES
    got[0] += b"more"
    got[2] += "more"
    assert (got[0][-5:], got[2][-5:]) == (b"xmore", "zmore")
    del got, frames
    gc.collect()
    assert maps() == before + sum(file._view is not None for file in pool.files)
    assert all(file.is_free() for file in pool.files)


@pytest.mark.parametrize("allocator", ["malloc", "malloc_debug", "pymalloc_debug"])
def test_with_other_allocators_objects_are_copied_or_mapped_as_they_can(allocator: str) -> None:
    program = (
        "from monarch_slurm.wire import dumps, loads\n"
        f"value = [kind * {MAPPED_BYTES} for kind in (b'x', bytearray(b'y'), 'z')]\n"
        "got = loads(dumps(value)); got[1] += b'1'; value[1] += b'1'\n"
        "assert got == value\n"
    )
    environment = {**os.environ, "PYTHONMALLOC": allocator}
    assert subprocess.run([sys.executable, "-c", program], check=False, env=environment).returncode == 0


def test_what_is_mapped_is_private_in_a_forked_process_too() -> None:
    got = loads(dumps(bytearray(b"x" * MAPPED_BYTES)))
    pid = os.fork()
    if pid == 0:
        got[:] = b"y" * len(got)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert got.count(b"x") == MAPPED_BYTES


def test_a_value_larger_than_a_file_is_in_several_and_in_one_piece_on_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_buffers, "SEGMENT_BYTES", 2 * BULK_BYTES)
    value = {"array": np.arange(5 * BULK_BYTES, dtype=np.uint8), "bytes": b"x" * MAPPED_BYTES, "small": bytes(70_000)}
    frames = dumps(value)
    assert sum(isinstance(frame, Bulk) for frame in frames) > 15
    assert same(loads(frames), value)
    assert same(loads(cut(frames, 3 * 2**20)), value)


def test_without_descriptors_values_are_plain_memory(pool: MemoryPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> int:
        raise OSError(24, "Too many open files")

    value = [np.arange(3 * BULK_BYTES, dtype=np.uint8), b"x" * BULK_BYTES]
    monkeypatch.setattr(os, "memfd_create", none_left)
    frames = dumps(value)
    assert not any(isinstance(frame, Bulk) for frame in frames)
    assert same(loads(frames), value)


def test_files_come_back_to_the_pool_when_something_does_not_pickle(pool: MemoryPool) -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        dumps([bytes(5 * BULK_BYTES), (x for x in ())])
    assert pool.files
    assert all(file.is_free() for file in pool.files)


def test_the_sender_copies_once_and_the_receiver_not_at_all() -> None:
    value = np.ones(64 * 2**20, dtype=np.uint8)
    dumps(value)  # the file is there
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        got = loads(dumps(value))
        assert got[0] == 1
        del got
    pages = value.nbytes // memory_files.PAGE_BYTES
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 2 * pages


def test_a_pool_gives_memory_back_after_a_while(pool: MemoryPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_files, "KEPT_BYTES", 2 * BULK_BYTES)
    monkeypatch.setattr(memory_files, "KEEP_SECONDS", 0.1)
    for frames in [dumps(bytes(BULK_BYTES)) for _ in range(6)]:
        assert len(frames) == 2
    assert len(pool.files) > 2
    wait_until(lambda: sum(file.size for file in pool.files) <= 2 * BULK_BYTES, "the pool shrinks")


def test_a_copy_in_one_thread_keeps_no_other_from_getting_files(pool: MemoryPool) -> None:
    taken, go_on = threading.Event(), threading.Event()
    real = memory_files.MemoryFile.write

    def write(self: Any, at: int, data: memoryview) -> None:
        if data[:1] == b"w":
            taken.set()
            assert go_on.wait(DEADLINE)
        real(self, at, data)

    thread = threading.Thread(target=lambda: dumps(b"w" * BULK_BYTES))
    memory_files.MemoryFile.write = write  # type: ignore[method-assign]
    try:
        thread.start()
        assert taken.wait(DEADLINE)
        assert loads(dumps(b"x" * BULK_BYTES)) == b"x" * BULK_BYTES
    finally:
        go_on.set()
        thread.join(DEADLINE)
        memory_files.MemoryFile.write = real  # type: ignore[method-assign]


def test_memory_of_this_process_is_known() -> None:
    assert 2**20 < own_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@given(st.binary(max_size=200), st.lists(st.binary(max_size=100), max_size=3))
def test_a_head_that_is_none_is_refused(head: bytes, rest: list[bytes]) -> None:
    try:
        incoming = Incoming([head, *rest])
        parts = list(incoming.buffers())
    except pickle.UnpicklingError:
        return
    except UnicodeDecodeError:
        return
    total = sum(map(len, rest))
    assert all(len(part) <= total for part in parts)  # type: ignore[arg-type]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_a_table_that_points_elsewhere_is_refused(at: int, size: int) -> None:
    outgoing = Outgoing()
    outgoing.add(memoryview(bytes(BULK_BYTES)), Kind.BUFFER)
    _, *rest = outgoing.frames(b"")
    wrong = struct.pack("<IQQ", 1, at, size)
    try:
        (part,) = Incoming([wrong, *rest]).buffers()
    except pickle.UnpicklingError:
        return
    except (ValueError, UnicodeDecodeError):  # the kind is that of a text
        return
    assert len(part) <= BULK_BYTES  # type: ignore[arg-type]


def test_a_text_that_did_not_come_is_refused() -> None:
    incoming = Incoming(dumps([b"x" * BULK_BYTES]))
    for number in (0, -1, 7):
        with pytest.raises(pickle.UnpicklingError, match=f"no text {number}"):
            incoming.text(number)
