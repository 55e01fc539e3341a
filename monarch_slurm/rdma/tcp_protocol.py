"""What the TCP connections of transfers say to each other. Fixed sizes only; nothing is unpickled.

Handshake: the server sends 32 random bytes; the client answers with 32 of its own and a proof that it knows the
server's secret; the server answers with its proof. Before that nothing is read but those 64 bytes. Then the client
sends requests (`REQUEST`, for a write followed by the data), and the server answers each in order (`REPLY`, for a
successful read followed by the data and a `TRAILER`: a buffer may be dropped while its data are under way, and then the
rest is zeros).
"""

from __future__ import annotations

import hashlib
import hmac
import struct

NONCE_BYTES = 32
PROOF_BYTES = 32

REQUEST = struct.Struct("<QQQQQ")
"""Operation, slot, key, offset, length."""
REPLY = struct.Struct("<QQ")
"""Status, length of the data that follow."""

TRAILER = struct.Struct("<Q")
"""Status, once more."""

READ, WRITE = 1, 2
DONE, GONE, OUT_OF_RANGE, READ_ONLY, FAILED = range(5)


def proof(secret: bytes, role: bytes, theirs: bytes, ours: bytes) -> bytes:
    """Return the proof that ``role`` knows ``secret``, for the peer's and our own random bytes."""
    return hmac.new(secret, b"monarch_slurm.rdma 1 " + role + theirs + ours, hashlib.sha256).digest()
