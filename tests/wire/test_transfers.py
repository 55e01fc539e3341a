from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from support import DEADLINE, wait_until

from monarch_slurm.config import configured
from monarch_slurm.wire import Address, Link, Loop, Message, WireError, dumps, loads
from monarch_slurm.wire.arriving import Arriving, Holding, LostPayloadError, when_whole
from monarch_slurm.wire.bulk import BULK_BYTES, Bulk, in_bulk, in_place
from monarch_slurm.wire.frames import encode
from monarch_slurm.wire.sockets import make_dealer, make_router
from monarch_slurm.wire.transfers import (
    CREDIT,
    PIECE_BYTES,
    WINDOW,
    Inbox,
    Outbox,
    credit,
    credited,
    is_promised,
    kind_of,
)

HERE, THERE = Address("h", "here"), Address("h", "there")


def value_of(size: int) -> dict[str, Any]:
    return {"array": np.arange(size, dtype=np.uint8), "bytes": os.urandom(size), "text": "x" * size, "small": [1, 2]}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return np.array_equal(one["array"], other["array"]) and all(one[key] == other[key] for key in one if key != "array")


def wire(outbox: Outbox) -> list[list[Any]]:
    return [[struct.pack("<Q", 0) + place, bytes(in_place(piece))] for place, piece in outbox.pieces()]


def plain(frames: list[Any]) -> list[Any]:
    return [bytes(in_place(frame)) for frame in frames]


def test_a_message_goes_ahead_of_its_large_frames_and_few_pieces_are_under_way() -> None:
    value = value_of(3 * BULK_BYTES)
    outbox, inbox = Outbox(lambda: None), Inbox()
    sent = encode(Message("m", THERE, HERE, {"n": 1}, dumps(value)), 7)
    first = plain(outbox.promise(sent))
    assert is_promised(first)
    assert max(map(len, first)) < BULK_BYTES
    got = inbox.take(first)
    rounds = 0
    while pieces := wire(outbox):
        assert len(pieces) <= WINDOW
        assert max(len(piece[1]) for piece in pieces) <= PIECE_BYTES
        rounds += 1
        for piece in pieces:
            inbox.piece(piece)
        outbox.taken(len(pieces))
    assert rounds >= 9 * BULK_BYTES // PIECE_BYTES // WINDOW
    assert plain(got) == plain(sent), "as it was sent, number and all"
    assert all(isinstance(in_bulk(frame), Bulk) for frame in got if isinstance(frame, Arriving))


def test_two_large_frames_take_turns() -> None:
    outbox = Outbox(lambda: None)
    for number in range(2):
        outbox.promise(encode(Message("m", THERE, HERE, {}, [b"", os.urandom(4 * BULK_BYTES)]), number))
    numbers = [struct.unpack_from("<Q", piece[0], 12)[0] for piece in wire(outbox)]
    assert numbers == [0, 1] * (WINDOW // 2)


def test_what_is_still_arriving_is_passed_on_when_it_is_there() -> None:
    ready = threading.Event()
    outbox, inbox = Outbox(ready.set), Inbox()
    arriving = Arriving(BULK_BYTES)
    first = plain(outbox.promise([encode(Message("m", THERE, HERE), 0)[0], arriving]))
    got = inbox.take(first)
    assert wire(outbox) == []
    data = os.urandom(BULK_BYTES)
    arriving.write(0, memoryview(data))
    assert ready.is_set()
    for piece in wire(outbox):
        inbox.piece(piece)
    assert plain(got)[1] == data


def test_what_was_lost_on_its_way_here_is_lost_for_whoever_it_is_passed_on_to() -> None:
    outbox, inbox = Outbox(lambda: None), Inbox()
    arriving = Arriving(BULK_BYTES)
    got = inbox.take(plain(outbox.promise([encode(Message("m", THERE, HERE), 0)[0], arriving])))
    arriving.fail("the host was lost")
    for piece in wire(outbox):
        inbox.piece(piece)
    with pytest.raises(LostPayloadError, match="0 of 1048576 bytes"):
        in_place(got[1])


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80), st.binary(max_size=80))
def test_garbage_is_refused(first: bytes, last: bytes) -> None:
    inbox = Inbox()
    for take in (lambda: inbox.take([first.ljust(12, b"\0"), last]), lambda: inbox.piece([first, last])):
        with pytest.raises(WireError):
            take()
    with pytest.raises(WireError):
        credited([first, last])


@pytest.mark.parametrize(
    ("place", "number", "size"), [(0, 0, BULK_BYTES), (5, 0, BULK_BYTES), (1, 0, 2**62), (1, 0, 0)]
)
def test_promises_that_cannot_be_are_refused_before_there_is_memory_for_them(
    place: int, number: int, size: int
) -> None:
    first, *_ = plain(Outbox(lambda: None).promise(encode(Message("m", THERE, HERE, {}, [b"", bytes(BULK_BYTES)]), 0)))
    with pytest.raises(WireError, match="max_frame_length"):
        Inbox().take([first, struct.pack("<I2Q", place, number, size)])


def test_a_piece_that_is_not_the_next_is_refused() -> None:
    arriving = Arriving(BULK_BYTES)
    for at, size in ((1, 10), (0, BULK_BYTES + 1), (0, 0)):
        with pytest.raises(WireError, match="of which 0 have come"):
            arriving.write(at, memoryview(bytes(size)))


@pytest.mark.parametrize("count", [0, WINDOW + 1, 2**32 - 1])
def test_more_credit_than_there_can_be_is_refused(count: int) -> None:
    frames = [credit(3, count)]
    assert kind_of(frames) == CREDIT
    with pytest.raises(WireError, match="pieces were taken"):
        credited(frames)


def test_without_descriptors_what_arrives_is_plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("monarch_slurm.wire.memory_files.MemoryPool.take", lambda self, size: none_left(size))
    arriving = Arriving(BULK_BYTES)
    assert arriving.write(0, memoryview(b"x" * BULK_BYTES))
    assert in_place(arriving) == b"x" * BULK_BYTES


def test_messages_wait_for_those_before_them_to_the_same_receiver_only() -> None:
    sent: list[tuple[str, int]] = []
    holding = Holding[str](lambda receiver, message: sent.append((receiver, message.fields["n"])))

    def send(receiver: str, number: int, *body: Any) -> None:
        message = Message("m", THERE, HERE, {"n": number}, body)
        if not holding.hold(receiver, message):
            sent.append((receiver, number))

    first, second, lost = Arriving(BULK_BYTES), Arriving(BULK_BYTES), Arriving(BULK_BYTES)
    send("a", 1, b"", first)
    send("a", 2)
    send("b", 3)
    send("a", 4, b"", lost)
    send("a", 5, b"", second)
    send("c", 6, b"", lost)
    assert sent == [("b", 3)]
    lost.fail("its host was lost")
    assert sent == [("b", 3)]
    first.write(0, memoryview(bytes(BULK_BYTES)))
    assert sent == [("b", 3), ("a", 1), ("a", 2)]
    send("a", 7)
    second.write(0, memoryview(bytes(BULK_BYTES)))
    assert sent[3:] == [("a", 5), ("a", 7)]
    send("a", 8)
    send("c", 9)
    assert sent[5:] == [("a", 8), ("c", 9)]
    send("d", 10, Arriving(BULK_BYTES))
    send("d", 11)
    assert [message.fields["n"] for message in holding.forget("d")] == [10, 11]


class Ends:
    """A ROUTER link and two DEALER links."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        folder.chmod(0o700)
        self.loops: list[Loop] = []
        self.faults: list[WireError] = []
        address = f"ipc://{folder / 'sock'}"
        router = make_router(self.context)
        router.bind(address)
        self.got: list[Message] = []
        self.router = self._link(router, lambda _, message: self.take(message))
        self.take = self.got.append
        self.back: list[Message] = []
        self.dealers = [self._dealer(name, address) for name in ("one", "two")]

    def _dealer(self, name: str, address: str) -> Link:
        socket = make_dealer(self.context, name)
        socket.connect(address)
        return self._link(socket, lambda _, message: self.back.append(message))

    def _link(self, socket: zmq.Socket[bytes], take: Any) -> Link:
        loop = Loop()
        link = Link(loop, socket, take, lambda _, error: self.faults.append(error))
        self.loops.append(loop)
        loop.start("link")
        return link

    def close(self) -> None:
        for loop in self.loops:
            loop.stop()
            loop.join(DEADLINE)
        for link in (self.router, *self.dealers):
            link.close()
        self.context.destroy(linger=0)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends(tmp_path)
    yield made
    made.close()


def test_large_and_small_messages_over_links_both_ways(ends: Ends) -> None:
    values = [value_of(size) for size in (10, BULK_BYTES, 5 * BULK_BYTES + 3)]
    for number, value in enumerate(values):
        ends.dealers[0].send(Message("m", THERE, HERE, {"n": number}, dumps(value)))
    wait_until(lambda: len(ends.got) == 3)
    assert [message.fields["n"] for message in ends.got] == [0, 1, 2]
    assert all(same(loads(message.body), value) for message, value in zip(ends.got, values, strict=True))
    ends.router.send(Message("m", HERE, THERE, {}, dumps(values[2])), "one")
    wait_until(lambda: len(ends.back) == 1)
    assert same(loads(ends.back[0].body), values[2])
    assert ends.faults == []


def test_messages_are_passed_on_while_they_arrive(ends: Ends) -> None:
    ends.dealers[1].send(Message("hello", THERE, HERE))
    wait_until(lambda: len(ends.got) == 1)
    ends.take = lambda message: ends.router.send(message, "two")  # type: ignore[assignment]
    value = value_of(4 * BULK_BYTES)
    ends.dealers[0].send(Message("m", THERE, HERE, {}, dumps(value)))
    wait_until(lambda: len(ends.back) == 1)
    assert same(loads(ends.back[0].body), value)


def test_many_threads_send_large_messages(ends: Ends) -> None:
    def work(number: int) -> None:
        for _ in range(5):
            ends.dealers[0].send(Message("m", THERE, HERE, {"n": number}, dumps(bytes([number]) * BULK_BYTES)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    wait_until(lambda: len(ends.got) == 20)
    assert all(loads(message.body) == bytes([message.fields["n"]]) * BULK_BYTES for message in ends.got)


def test_what_does_not_come_any_more_is_an_error(ends: Ends) -> None:
    come, go_on = threading.Event(), threading.Event()

    def take(message: Message) -> None:
        ends.got.append(message)
        come.set()
        assert go_on.wait(DEADLINE)

    ends.take = take  # type: ignore[assignment]
    ends.dealers[0].send(Message("m", THERE, HERE, {}, dumps(bytes(20 * BULK_BYTES))))
    assert come.wait(DEADLINE)
    called = threading.Event()
    when_whole(ends.got[0].body, called.set)
    ends.router.forget("one")
    go_on.set()
    assert called.wait(DEADLINE)
    with pytest.raises(LostPayloadError):
        loads(ends.got[0].body)


def test_a_frame_above_the_limit_is_refused_by_its_receiver() -> None:
    first = plain(Outbox(lambda: None).promise(encode(Message("m", THERE, HERE, {}, dumps(bytes(3 * BULK_BYTES))), 0)))
    with configured(max_frame_length=2 * BULK_BYTES), pytest.raises(WireError, match="max_frame_length"):
        Inbox().take(first)
