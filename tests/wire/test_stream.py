from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import DEADLINE, wait_until

from monarch_slurm.config import clear_runtime_config, configure
from monarch_slurm.wire import WireError
from monarch_slurm.wire.bulk import in_place
from monarch_slurm.wire.stream import PeerGoneError, StrangerError, Stream, check_peer, dial


class Pair:
    def __init__(self) -> None:
        one, self.raw = socket.socketpair()
        self.stream = Stream(one)
        self.other = Stream(self.raw.dup())

    def close(self) -> None:
        for stream in (self.stream, self.other):
            with stream.lock:
                stream.close()
        self.raw.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def packets_of(data: bytes, *cuts: int) -> list[list[bytes]]:
    """What comes out when ``data`` arrives in pieces."""
    pair = Pair()
    found = []
    try:
        for start, end in zip((0, *cuts), (*cuts, len(data)), strict=True):
            pair.raw.sendall(data[start:end])
            if end > start:
                found += pair.stream.read()
    finally:
        pair.close()
    return [[bytes(frame) for frame in packet] for packet in found]


def written(*packets: list[bytes]) -> bytes:
    return b"".join(struct.pack(f"<I{len(p)}Q", len(p), *map(len, p)) + b"".join(p) for p in packets)


packets = st.lists(st.lists(st.binary(max_size=30), min_size=1, max_size=4), min_size=1, max_size=4)


@given(packets, st.data())
def test_packets_come_out_as_they_went_in_however_they_are_cut(sent: list[list[bytes]], data: st.DataObject) -> None:
    raw = written(*sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    assert packets_of(raw, *cuts) == sent


@given(st.binary(min_size=1, max_size=300))
def test_garbage_is_refused_or_waited_for_and_nothing_else_happens(garbage: bytes) -> None:
    try:
        packets_of(garbage)
    except WireError:
        return


@pytest.mark.parametrize("size", [70_000, 300_000, 5_000_000])
def test_large_frames_between_small_ones(pair: Pair, size: int) -> None:
    frames = [b"first", os.urandom(size), b"", os.urandom(size), b"last"]
    got: list[list[bytes]] = []

    def take() -> None:
        while len(got) < 2:
            got.extend([bytes(in_place(frame)) for frame in packet] for packet in pair.other.read())

    reader = threading.Thread(target=take)
    reader.start()
    with pair.stream.lock:
        pair.stream.write(frames)
        pair.stream.write([b"next"])
        while not pair.stream.flush():
            pass
    reader.join(DEADLINE)
    assert got == [frames, [b"next"]]


def test_a_full_socket_queues_and_keeps_order(pair: Pair) -> None:
    with pair.stream.lock:
        for number in range(20_000):
            pair.stream.write([struct.pack("<I", number)])
        assert pair.stream.queue, "all of it fits into the socket: this test shows nothing"
    numbers: list[int] = []
    while len(numbers) < 20_000:
        numbers += [struct.unpack("<I", packet[0])[0] for packet in pair.other.read()]
        with pair.stream.lock:
            pair.stream.flush()
    assert numbers == list(range(20_000))


def test_more_frames_than_the_kernel_takes_at_once(pair: Pair) -> None:
    frames = [bytes([number % 256]) for number in range(3000)]
    with pair.stream.lock:
        pair.stream.write(frames)
        assert pair.stream.flush()
    assert wait_until(pair.other.read) == [frames]


def test_what_was_sent_before_the_end_is_read_and_then_the_end(pair: Pair) -> None:
    with pair.stream.lock:
        pair.stream.write([b"last words"])
        pair.stream.close()
    assert pair.other.read() == [[b"last words"]]
    assert not pair.other.ended
    assert pair.other.read() == []
    assert pair.other.ended
    with pair.other.lock, pytest.raises(PeerGoneError):
        pair.other.write([b"x"])


def test_a_frame_beyond_the_limit_is_refused_before_memory_is_taken_for_it() -> None:
    configure(max_frame_length=1000)
    try:
        with pytest.raises(WireError, match="2000 bytes; 1000 are allowed"):
            packets_of(struct.pack("<IQ", 1, 2000))
    finally:
        clear_runtime_config()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_user_is_recognised(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "sock"))
    pid = os.fork()
    if pid == 0:
        os.setuid(12345)
        listener.listen()  # the kernel takes the listener's user from whoever calls this
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    with pytest.raises(StrangerError, match="uid 12345"):
        dial(tmp_path / "sock")
    listener.close()
    one, other = socket.socketpair()
    check_peer(one)
    one.close()
    other.close()
