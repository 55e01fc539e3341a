from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_slurm.wire import Address, Message, WireError, pack
from monarch_slurm.wire.frames import decode, encode, number_of

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
addresses = st.builds(Address, st.text(), st.text())
bodies = st.lists(st.binary(max_size=100) | st.just(bytes(20_000)), max_size=4)


@given(st.text(), addresses, addresses, st.dictionaries(st.text(), plain, max_size=5), bodies)
def test_a_message_comes_out_as_it_went_in(
    kind: str, dst: Address, src: Address, fields: dict[str, object], body: list[bytes]
) -> None:
    frames = [bytes(frame) for frame in encode(Message(kind, dst, src, fields, body), 7)]
    message = decode(frames)
    assert number_of(frames) == 7
    assert (message.kind, message.dst, message.src, message.fields) == (kind, dst, src, fields)
    assert list(message.body) == body
    message.fields = {}
    passed_on = [bytes(frame) for frame in encode(message, 8)]
    assert number_of(passed_on) == 8
    assert decode(passed_on).fields == fields, "a message that is passed on is not encoded again"
    assert list(decode(passed_on).body) == body


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_garbage_is_refused_and_nothing_else_happens(frames: list[bytes]) -> None:
    try:
        message = decode(frames)
    except WireError:
        return
    assert isinstance(message.fields, dict)


@given(st.text(), plain, plain, plain)
def test_headers_of_other_shapes_are_refused(kind: str, dst: object, src: object, fields: object) -> None:
    header = pack([kind, dst, src, fields])
    try:
        message = decode([struct.pack("<QI", 0, len(header)) + header])
    except WireError:
        return
    assert all(isinstance(text, str) for text in (*message.dst, *message.src))


@given(st.dictionaries(st.text(), plain, max_size=5), st.data())
def test_truncated_headers_are_refused(fields: dict[str, object], data: st.DataObject) -> None:
    frame = bytes(encode(Message("kind", Address("a", "b"), Address("c", "d"), fields), 0)[0])
    cut = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(WireError):
        decode([frame[:cut]])
    with pytest.raises(WireError):
        decode([frame + b"more"])


@given(st.dictionaries(st.text(), plain, max_size=3), bodies, st.data())
def test_damaged_messages_are_refused_or_are_messages(
    fields: dict[str, object], body: list[bytes], data: st.DataObject
) -> None:
    frames = [bytes(frame) for frame in encode(Message("kind", Address("a", "b"), Address("c", "d"), fields, body), 0)]
    damaged = bytearray(frames[0])
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    rest = data.draw(st.permutations(frames[1:]))[: data.draw(st.integers(0, len(frames)))]
    try:
        message = decode([bytes(damaged), *rest])
    except WireError:
        return
    assert isinstance(message.kind, str)
    assert isinstance(message.fields, dict)
    assert all(isinstance(text, str) for text in (*message.dst, *message.src))


@pytest.mark.parametrize("deep", [b"\x91" * 5000, b"\x81\xa0" * 5000, b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"])
def test_headers_that_would_take_all_memory_or_stack_are_refused(deep: bytes) -> None:
    with pytest.raises(WireError, match="not a message header"):
        decode([struct.pack("<QI", 0, len(deep)) + deep])


def test_a_header_beyond_all_measure_is_refused() -> None:
    large = 17 * 2**20
    with pytest.raises(WireError, match="not a message"):
        decode([struct.pack("<QI", 0, large) + bytes(large)])
    with pytest.raises(WireError, match="not a message"):
        decode([])


@given(st.integers(0, 2**64 - 1))
def test_sequence_numbers(number: int) -> None:
    frames = [bytes(frame) for frame in encode(Message("k", Address("a", "b"), Address("c", "d")), number)]
    assert number_of(frames) == number


def test_addresses_read_well() -> None:
    assert str(Address("n1#2", "agent")) == "n1#2/agent"
