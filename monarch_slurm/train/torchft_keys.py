"""Keys of the state transfer that travel through TorchFT's own manager servers.

TorchFT tells a replica that is behind what its donor's transport calls its metadata. Here that is a secret besides the
address, new for every quorum, of which both ends make the receiver's key. A manager server tells the metadata to
whoever asks it: these keys keep out only those who cannot reach it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Callable
from datetime import timedelta
from typing import Any

# As in transfer.py: whichever module loads the library first.
os.environ.setdefault("RUST_LOG", "warn")

from torchft.checkpointing import CheckpointTransport

from monarch_slurm.train.proof import KEY_BYTES
from monarch_slurm.train.transfer import StateTransport


class TorchftKeys(CheckpointTransport[Any]):  # type: ignore[misc]  # torchft has no types
    """A transport that gives ``transport`` its keys.

    Args:
        transport: does the work.
        own_rank: returns the rank of this replica in the quorum that has formed.
    """

    def __init__(self, transport: StateTransport, own_rank: Callable[[], int]) -> None:
        self._transport, self._own_rank = transport, own_rank
        self._secret = b""

    def metadata(self) -> str:
        """Return a new secret, and where the state is served; TorchFT asks for it once for each quorum."""
        self._secret = secrets.token_bytes(KEY_BYTES)
        return f"{self._secret.hex()} {self._transport.metadata()}"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """See `StateTransport.send_checkpoint`."""
        self._transport.admit(step, {_member(rank): _key(self._secret, rank, step) for rank in dst_ranks})
        self._transport.send_checkpoint(dst_ranks, step, state_dict, timeout)

    def disallow_checkpoint(self) -> None:
        """See `StateTransport.disallow_checkpoint`."""
        self._transport.disallow_checkpoint()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """See `StateTransport.recv_checkpoint`. The donor's hash is the one that it sends itself."""
        secret, _, where = metadata.partition(" ")
        rank = self._own_rank()
        self._transport.expect(step, _member(rank), _key(bytes.fromhex(secret), rank, step), None, _member(src_rank))
        return self._transport.recv_checkpoint(src_rank, where, step, timeout)

    def shutdown(self, wait: bool = True) -> None:
        """See `StateTransport.shutdown`."""
        self._transport.shutdown(wait)


def _member(rank: int) -> str:
    return f"replica rank {rank}"


def _key(secret: bytes, rank: int, step: int) -> bytes:
    return hmac.new(secret, f"{_member(rank)} step {step}".encode(), hashlib.sha256).digest()
