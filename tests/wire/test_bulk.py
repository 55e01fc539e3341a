from __future__ import annotations

import gc
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Callable

import numpy as np
import pytest
from support import DEADLINE

from monarch_slurm.wire import WireError, dumps, loads
from monarch_slurm.wire.bulk import BULK_BYTES, MAX_BULKS, Bulk, in_bulk, in_place
from monarch_slurm.wire.large_buffers import Buffer
from monarch_slurm.wire.memory_files import MemoryPool
from monarch_slurm.wire.stream import Stream


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def maps() -> int:
    gc.collect()
    with open("/proc/self/maps") as file:
        return sum("memfd:monarch_slurm" in line for line in file)


def through_streams(*packets: list[Buffer]) -> list[list[Buffer]]:
    one, other = socket.socketpair()
    sender, receiver = Stream(one), Stream(other)
    got: list[list[Buffer]] = []

    def take() -> None:
        while not receiver.ended:
            got.extend(receiver.read())

    thread = threading.Thread(target=take)
    thread.start()
    with sender.lock:
        for packet in packets:
            sender.write(packet)
        while not sender.flush():
            pass
        sender.close()
    thread.join(DEADLINE)
    with receiver.lock:
        receiver.close()
    return got


def test_a_copy_that_nobody_can_change() -> None:
    data = bytearray(os.urandom(BULK_BYTES + 5))
    bulk = Bulk.of(data)
    before = bytes(data)
    data[0] ^= 1
    assert len(bulk) == len(before)
    assert bulk.is_whole()
    assert bulk.view() == before
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(bulk.fd, b"x", 0)
    again = os.open(f"/proc/self/fd/{bulk.fd}", os.O_RDWR)
    for size in (1, 1 << 30):
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(again, size)
    os.close(again)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> MemoryPool:
    made = MemoryPool()
    monkeypatch.setattr("monarch_slurm.wire.memory_files._pool", made)
    return made


def inode(bulk: Bulk) -> int:
    return os.fstat(bulk.fd).st_ino


def test_memory_is_used_again_once_nobody_reads_it(pool: MemoryPool) -> None:
    first = Bulk.of(b"1" * BULK_BYTES)
    number, view = inode(first), first.view()
    del first
    second = Bulk.of(b"2" * BULK_BYTES)
    assert inode(second) != number
    assert view[:1] == b"1"
    del view
    gc.collect()
    third = Bulk.of(b"3" * (BULK_BYTES - 1))
    assert inode(third) == number
    assert (second.view()[:1], third.view()[-1:], len(third)) == (b"2", b"3", BULK_BYTES - 1)
    assert inode(Bulk.of(bytes(BULK_BYTES // 8))) not in (number, inode(second)), "a file of eight times the size"


def test_memory_is_used_again_when_who_read_it_was_killed(pool: MemoryPool) -> None:
    bulk = Bulk.of(b"1" * BULK_BYTES)
    number = inode(bulk)
    reader = subprocess.Popen(["sleep", "1000"], pass_fds=[bulk.fd])
    del bulk
    other = Bulk.of(b"2" * BULK_BYTES)
    assert inode(other) != number
    reader.kill()
    reader.wait()
    assert inode(Bulk.of(b"3" * BULK_BYTES)) == number


def test_a_pool_keeps_no_more_than_its_limit(pool: MemoryPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch_slurm.wire.memory_files.KEPT_BYTES", 3 * BULK_BYTES)
    monkeypatch.setattr("monarch_slurm.wire.memory_files.own_memory", lambda: 0)
    held = [Bulk.of(bytes([number]) * BULK_BYTES) for number in range(8)]
    assert len(pool.files) == 3
    assert [bulk.view()[0] for bulk in held] == list(range(8))
    Bulk.of(bytes(4 * BULK_BYTES))
    assert pool.files == []


def test_a_forked_process_has_a_pool_of_its_own(pool: MemoryPool) -> None:
    number = inode(Bulk.of(b"1" * BULK_BYTES))
    pid = os.fork()
    if pid == 0:
        os._exit(inode(Bulk.of(b"2" * BULK_BYTES)) == number)
    assert os.waitpid(pid, 0)[1] == 0
    assert inode(Bulk.of(b"3" * BULK_BYTES)) == number


def test_many_threads_never_share_memory(pool: MemoryPool) -> None:
    wrong: list[int] = []

    def work(me: int) -> None:
        for _ in range(30):
            bulk = Bulk.of(bytes([me]) * BULK_BYTES)
            view = bulk.view()
            del bulk
            if view[0] != me or view[-1] != me:
                wrong.append(me)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert wrong == []


def test_what_is_written_to_a_view_is_seen_by_no_other() -> None:
    bulk = Bulk.of(bytes(BULK_BYTES))
    one, other = bulk.view(), bulk.view()
    one[:3] = b"abc"
    assert other[:3] == bytes(3)
    assert bulk.view()[:3] == bytes(3)
    assert one[:3] == b"abc"


def test_arrays_come_out_writable_and_leave_nothing_behind(pool: MemoryPool) -> None:
    files, mapped = descriptors(), maps()
    array = np.arange(BULK_BYTES, dtype=np.int32)
    frames = dumps({"a": array, "b": array[:10]})
    assert [type(frame) for frame in frames[1:]] == [Bulk]
    array[0] = 7
    value = loads(frames)
    value["a"][1] = 8
    assert value["a"][:3].tolist() == [0, 8, 2]
    assert loads(frames)["a"][:3].tolist() == [0, 1, 2]
    view = value["a"][5:10]
    del value, frames
    assert descriptors() == files + len(pool.files)
    assert view.tolist() == [5, 6, 7, 8, 9]
    del view
    assert maps() == mapped
    assert len(pool.files) == 1


def test_large_frames_travel_as_files_and_in_order(pool: MemoryPool) -> None:
    files = descriptors()
    big = [os.urandom(BULK_BYTES + number) for number in range(4)]
    sent: list[list[Buffer]] = [
        [b"head", big[0], b"", big[1]],
        [b"small"],
        [big[2]],
        [b"x", bytes(BULK_BYTES - 1), Bulk.of(big[3])],
    ]
    expected = [[bytes(in_place(frame)) for frame in packet] for packet in sent]
    got = through_streams(*sent)
    assert [[bytes(in_place(frame)) for frame in packet] for packet in got] == expected
    assert [[isinstance(frame, Bulk) for frame in packet] for packet in got] == [
        [False, True, False, True],
        [False],
        [True],
        [False, False, True],
    ]
    again = through_streams(got[0])
    assert in_place(again[0][1]) == big[0]
    del sent, got, again
    assert descriptors() == files + len(pool.files)


def test_more_large_frames_than_descriptors_fit_into_a_packet() -> None:
    bulk = Bulk.of(bytes(BULK_BYTES))
    packet: list[Buffer] = [b"head", *[bulk] * (MAX_BULKS + 3)]
    (got,) = through_streams(packet)
    assert sum(isinstance(frame, Bulk) for frame in got) == MAX_BULKS
    assert all(len(frame) == BULK_BYTES for frame in got[1:])


def test_without_descriptors_the_bytes_themselves_go(pool: MemoryPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", none_left)
    data = os.urandom(BULK_BYTES)
    assert in_bulk(data) is data
    assert bytes(loads(dumps(np.frombuffer(data, np.uint8)))) == data
    ((frame,),) = through_streams([data])
    assert frame == data


def unsealed(size: int) -> int:
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


def duplicate(bulk: Bulk) -> int:
    return os.dup(bulk.fd)


@pytest.mark.parametrize(
    "make",
    [
        lambda: unsealed(BULK_BYTES + 1),
        lambda: duplicate(Bulk.of(bytes(BULK_BYTES))),
        lambda: os.open("/dev/zero", os.O_RDONLY),
        lambda: -1,
    ],
    ids=["not sealed", "too short", "no memory", "none"],
)
def test_what_is_no_sealed_memory_of_that_size_is_refused(pool: MemoryPool, make: Callable[[], int]) -> None:
    files = descriptors()
    one, other = socket.socketpair()
    head = struct.pack("<IQ", 1, BULK_BYTES + 1 | 1 << 63)
    fd = make()
    if fd < 0:
        one.sendall(head)
    else:
        socket.send_fds(one, [head], [fd])
        os.close(fd)
    receiver = Stream(other)
    with pytest.raises(WireError, match="large buffer"):
        receiver.read()
    with receiver.lock:
        receiver.close()
    one.close()
    assert descriptors() == files + len(pool.files)
