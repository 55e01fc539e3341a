from __future__ import annotations

import itertools

import pytest

from monarch_slurm.wire import WireError
from monarch_slurm.wire import sealed_records as records
from monarch_slurm.wire.sealed_records import (
    HEADER_BYTES,
    LARGEST_BYTES,
    RECORD_BYTES,
    Opener,
    Sealer,
    TamperedError,
    make_key,
    read_header,
)

DATA = b"what nobody else may read" * 10


def sealed(sealer: Sealer, data: bytes = DATA, number: int = 3, at: int = 5) -> bytearray:
    buffer = bytearray(LARGEST_BYTES)
    return buffer[: sealer.seal(number, at, memoryview(data), memoryview(buffer))]


def opened(opener: Opener, record: bytes | bytearray) -> bytes:
    view = memoryview(record)
    into = bytearray(read_header(view[:HEADER_BYTES]).size)
    opener.open(view, memoryview(into))
    return bytes(into)


@pytest.mark.parametrize("size", [1, 100, RECORD_BYTES])
def test_what_is_sealed_is_opened(size: int) -> None:
    key = make_key()
    sealer, opener = Sealer(key), Opener(key)
    for number in range(3):
        data = bytes([number + 1]) * size
        record = sealed(sealer, data, number, 7)
        assert read_header(memoryview(record)[:HEADER_BYTES]) == (size, number, 7)
        assert opened(opener, record) == data
        assert data[:16] not in record or size < 16


def test_every_changed_bit_is_noticed() -> None:
    key = make_key()
    record = sealed(Sealer(key))
    for place in itertools.chain(range(4, HEADER_BYTES + 4), range(len(record) - 17, len(record))):
        changed = bytearray(record)
        changed[place] ^= 1
        with pytest.raises(TamperedError):
            opened(Opener(key), changed)
    assert opened(Opener(key), record) == DATA


def test_a_record_is_opened_once_in_its_turn_and_with_its_key() -> None:
    key = make_key()
    sealer = Sealer(key)
    first, second = sealed(sealer), sealed(sealer)
    opener = Opener(key)
    opened(opener, first)
    with pytest.raises(TamperedError, match="changed, repeated or left out"):
        opened(opener, first)
    for opener, record in ((Opener(key), second), (Opener(make_key()), first)):
        with pytest.raises(TamperedError):
            opened(opener, record)


def test_equal_bytes_are_never_sealed_alike() -> None:
    sealer = Sealer(make_key())
    assert len({bytes(sealed(sealer)) for _ in range(50)}) == 50


def test_both_ends_take_the_next_key_at_the_same_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RECORDS_OF_A_KEY", 4)
    key = make_key()
    sealer, opener = Sealer(key), Opener(key)
    made = [bytes(sealed(sealer)) for _ in range(20)]
    assert all(opened(opener, record) == DATA for record in made)
    assert len(set(made)) == 20, "a nonce is not used twice with a key"


def test_a_size_that_no_record_has_is_refused_before_it_is_read() -> None:
    header = bytearray(HEADER_BYTES)
    header[:4] = (RECORD_BYTES + 1).to_bytes(4, "little")
    with pytest.raises(WireError, match="at most 262144 are allowed"):
        read_header(memoryview(header))
