"""Records of a payload channel: encrypted with AES-GCM, numbered, and refused if a single bit differs.

A record is a header, which is readable on the way and authenticated, the encrypted bytes, and the tag. Each direction
of each connection has a key of its own, which is used nowhere else, and the nonce is the number of the record. So no
nonce is used twice with a key, and a record that is repeated, left out, moved or taken from another connection or
direction fails to decrypt.

AES with 128 bits is as strong as Curve25519, which the keys are handed over with. With one key at most 2**34 blocks of
16 bytes are encrypted, with which an attacker's advantage by collisions stays below 2**-60 (RFC 8446, section 5.5).
"""

from __future__ import annotations

import hmac
import os
import struct
from typing import NamedTuple

from monarch_slurm.wire.frames import WireError

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
except ImportError as error:  # such an environment still works, more slowly
    UNAVAILABLE = f"the package cryptography cannot be imported: {error}"
else:
    UNAVAILABLE = "" if hasattr(AESGCM, "encrypt_into") else "the package cryptography is older than version 47"
"""Why this process can make no records; empty if it can."""

RECORD_BYTES = 256 * 1024
"""The most that one record holds. A record and its plain bytes fit into the cache of a core."""

KEY_BYTES = 16
TAG_BYTES = 16

RECORDS_OF_A_KEY = 2**20
"""So many records are encrypted with a key; the next key is then derived from it at both ends."""

_HEADER = struct.Struct("<IQQ")
HEADER_BYTES = _HEADER.size
LARGEST_BYTES = HEADER_BYTES + RECORD_BYTES + TAG_BYTES
"""The size of a full record."""

_NONCE = struct.Struct("<4xQ")


class TamperedError(WireError):
    """A record was not written by the process at the other end, or is not the next that it wrote."""


class Header(NamedTuple):
    """What a record says before it is decrypted.

    Attributes:
        size: bytes that it holds.
        number: of the large frame that they belong to.
        at: where they belong in that frame.
    """

    size: int
    number: int
    at: int


def make_key() -> bytes:
    """Return a new random key."""
    return os.urandom(KEY_BYTES)


def read_header(data: memoryview) -> Header:
    """Return the header in ``data``. Nothing proves yet that it is genuine.

    Raises:
        WireError: no record has this header.
    """
    header = Header(*_HEADER.unpack(data))
    if header.size > RECORD_BYTES:
        raise WireError(f"a record of {header.size} bytes, where at most {RECORD_BYTES} are allowed")
    return header


class _Key:
    """The key of one direction, which changes after `RECORDS_OF_A_KEY` records."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._cipher = AESGCM(key)
        self._count = 0

    def next(self) -> tuple[AESGCM, bytes]:
        """Return the cipher and the nonce of the next record."""
        if self._count == RECORDS_OF_A_KEY:
            self._key = hmac.digest(self._key, b"the next key of a payload channel", "sha256")[:KEY_BYTES]
            self._cipher, self._count = AESGCM(self._key), 0
        nonce = _NONCE.pack(self._count)
        self._count += 1
        return self._cipher, nonce


class Sealer:
    """Makes the records of one direction. For one thread at a time."""

    def __init__(self, key: bytes) -> None:
        self._key = _Key(key)

    def seal(self, number: int, at: int, data: memoryview, into: memoryview) -> int:
        """Write the record with ``data`` into ``into``; return its size. Other threads run meanwhile."""
        size = len(data)
        end = HEADER_BYTES + size + TAG_BYTES
        _HEADER.pack_into(into, 0, size, number, at)
        cipher, nonce = self._key.next()
        cipher.encrypt_into(nonce, data, into[:HEADER_BYTES], into[HEADER_BYTES:end])
        return end


class Opener:
    """Reads the records of one direction. For one thread at a time."""

    def __init__(self, key: bytes) -> None:
        self._key = _Key(key)

    def open(self, record: memoryview, into: memoryview) -> None:
        """Decrypt a record, of the size that its header says, into ``into``. Other threads run meanwhile.

        Raises:
            TamperedError: it is not the next record of the other end. What ``into`` holds then means nothing.
        """
        cipher, nonce = self._key.next()
        try:
            cipher.decrypt_into(nonce, record[HEADER_BYTES:], record[:HEADER_BYTES], into)
        except InvalidTag:
            raise TamperedError("a record was changed, repeated or left out on the way") from None
