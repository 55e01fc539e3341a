"""Ranks prove to each other, over the connections of their data, that the control plane has sent them here.

gloo takes whoever connects to its port with the right number for the rank that should. So before a group's first
operation each rank sends each other rank a code that only those can compute which have the secret of the group
(`HMAC <https://www.rfc-editor.org/rfc/rfc2104>`_ with SHA-256, of the group, the sender and the receiver). The secret
itself travels over the control plane alone, and each group has its own.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from typing import Any

from monarch_slurm.collectives.errors import ProofError

_CODE_BYTES = hashlib.sha256().digest_size
_SECRET_BYTES = 32
_KEY = "monarch_slurm/secret"


def agree_on_secret(store: Any) -> bytes:
    """Return the secret of the group that meets at ``store``: that of whichever rank asks first.

    It is as secret as the store: only processes of the job reach a `monarch_slurm.collectives.job_store.JobStore`.
    """
    agreed: bytes = store.compare_set(_KEY, "", secrets.token_hex(_SECRET_BYTES))
    return bytes.fromhex(agreed.decode())


def prove(group: Any, rank: int, size: int, secret: bytes, name: str) -> None:
    """Exchange codes with all other ranks; blocks until each has sent its own.

    Args:
        group: gloo's process group.
        secret: what all ranks got over the control plane.
        name: of the group; groups with the same secret have different ones.

    Raises:
        ProofError: what came from one of them is another code; or none came within the group's timeout, or the
            connection broke.
    """
    import torch

    codes = b"".join(_code(secret, name, rank, peer) for peer in range(size))
    sent = torch.frombuffer(bytearray(codes), dtype=torch.uint8)
    received = torch.empty_like(sent)
    lengths = [_CODE_BYTES] * size
    here = f"rank {rank} of {size} on {socket.gethostname()}"
    try:
        group.alltoall_base(received, sent, lengths, lengths).wait()
    except RuntimeError as error:
        raise ProofError(
            f"{here} did not get the proofs of all other ranks: one has ended, or a process that is not of the job has "
            f"connected to a data port in the place of a rank ({error})"
        ) from error
    found = bytes(received.tolist())
    for peer in range(size):
        code = found[peer * _CODE_BYTES : (peer + 1) * _CODE_BYTES]
        if not hmac.compare_digest(code, _code(secret, name, peer, rank)):
            raise ProofError(
                f"rank {peer} of {size} did not prove to {here} that it belongs to the group: a process that is not of "
                "the job has connected to the data port in its place, or the ranks got different secrets"
            )


def _code(secret: bytes, name: str, sender: int, receiver: int) -> bytes:
    return hmac.digest(secret, f"{name} {sender}>{receiver}".encode(), "sha256")
