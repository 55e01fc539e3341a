from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_slurm.wire import Address, Message, WireError
from monarch_slurm.wire.frames import decode, encode, pack_sequence, unpack_sequence

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
addresses = st.builds(Address, st.text(), st.text())
bodies = st.lists(st.binary(max_size=100), max_size=4)


@given(st.text(), addresses, addresses, st.dictionaries(st.text(), plain, max_size=5), bodies)
def test_a_message_comes_out_as_it_went_in(
    kind: str, dst: Address, src: Address, fields: dict[str, object], body: list[bytes]
) -> None:
    frames = encode(Message(kind, dst, src, fields, body))
    message = decode([bytes(frame) for frame in frames])
    assert (message.kind, message.dst, message.src, message.fields) == (kind, dst, src, fields)
    assert list(message.body) == body
    assert encode(message) == frames, "a message that is passed on is not encoded again"


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_garbage_is_refused_and_nothing_else_happens(frames: list[bytes]) -> None:
    try:
        message = decode(frames)
    except WireError:
        return
    assert isinstance(message.fields, dict)


@given(st.text(), plain, plain, plain)
def test_headers_of_other_shapes_are_refused(kind: str, dst: object, src: object, fields: object) -> None:
    from monarch_slurm.wire import pack

    try:
        message = decode([pack([kind, dst, src, fields])])
    except WireError:
        return
    assert all(isinstance(text, str) for text in (*message.dst, *message.src))


@given(st.dictionaries(st.text(), plain, max_size=5), st.data())
def test_truncated_headers_are_refused(fields: dict[str, object], data: st.DataObject) -> None:
    header = bytes(encode(Message("kind", Address("a", "b"), Address("c", "d"), fields))[0])
    cut = data.draw(st.integers(0, len(header) - 1))
    with pytest.raises(WireError):
        decode([header[:cut]])


def test_a_header_beyond_all_measure_is_refused() -> None:
    with pytest.raises(WireError, match="not a message"):
        decode([bytes(17 * 2**20)])
    with pytest.raises(WireError, match="not a message"):
        decode([])


@given(st.integers(0, 2**64 - 1))
def test_sequence_numbers(number: int) -> None:
    assert unpack_sequence(pack_sequence(number)) == number


@given(st.binary(max_size=20).filter(lambda frame: len(frame) != 8))
def test_sequence_numbers_of_other_lengths_are_refused(frame: bytes) -> None:
    with pytest.raises(WireError, match="not a sequence number"):
        unpack_sequence(frame)


def test_addresses_read_well() -> None:
    assert str(Address("n1#2", "agent")) == "n1#2/agent"
