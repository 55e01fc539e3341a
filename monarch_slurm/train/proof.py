"""How the two ends of a state transfer prove to each other that they hold the same key, which never travels.

The receiver says which step it wants and which member of the quorum it is, with a nonce (32 random bytes). The donor
answers with a nonce of its own. Then the receiver sends its proof, and the donor, once it has checked that, its own.
A proof is HMAC-SHA256 over the side that proves, the step, the member and both nonces: it is of no use on another
connection, to another member, for another step, or sent back to whoever made it. When the state has been sent, its hash
follows with such a proof of the donor.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass

KEY_BYTES = 32
NONCE_BYTES = 32
PROOF_BYTES = 32
HASH_BYTES = 32
MAX_MEMBER_BYTES = 255

_PROTOCOL = b"monarch_slurm.state 2"
_HELLO = struct.Struct(f">q{NONCE_BYTES}sB")

Fill = Callable[[memoryview], None]
"""Fills the whole of a buffer with the next bytes of the peer, or raises."""


@dataclass(frozen=True)
class Session:
    """What both ends know of one connection before either has proved anything.

    Attributes:
        step: that the receiver wants.
        member: id of the receiver in the quorum.
        receiver_nonce: of the receiver.
        donor_nonce: of the donor.
    """

    step: int
    member: str
    receiver_nonce: bytes
    donor_nonce: bytes

    def proof(self, key: bytes, side: str, said: bytes = b"") -> bytes:
        """Return the proof that ``side``, ``"donor"`` or ``"receiver"``, holds ``key`` and says ``said``."""
        name = self.member.encode()
        parts = [_PROTOCOL, side.encode(), _HELLO.pack(self.step, self.receiver_nonce, len(name)), name]
        return hmac.new(key, b"\0".join([*parts, self.donor_nonce, said]), hashlib.sha256).digest()

    def is_proof(self, proof: bytes | bytearray, key: bytes, side: str, said: bytes = b"") -> bool:
        """Return whether ``proof`` is what `proof` returns; takes the same time wherever they differ."""
        return hmac.compare_digest(bytes(proof), self.proof(key, side, said))


def ask(step: int, member: str, send: Callable[[bytes], object], fill: Fill) -> Session:
    """Begin at the receiver: say what is wanted, and take the donor's nonce."""
    name = member.encode()
    nonce = os.urandom(NONCE_BYTES)
    send(_HELLO.pack(step, nonce, len(name)) + name)
    return Session(step, member, nonce, receive(fill, NONCE_BYTES))


def answer(send: Callable[[bytes], object], fill: Fill) -> Session:
    """Begin at the donor: take what the receiver says, and answer with a nonce.

    Raises:
        ValueError: the member's id is no text.
    """
    step, nonce, length = _HELLO.unpack(receive(fill, _HELLO.size))
    member = receive(fill, length).decode()
    ours = os.urandom(NONCE_BYTES)
    send(ours)
    return Session(step, member, nonce, ours)


def receive(fill: Fill, count: int) -> bytes:
    """Return the next ``count`` bytes."""
    buffer = bytearray(count)
    fill(memoryview(buffer))
    return bytes(buffer)
