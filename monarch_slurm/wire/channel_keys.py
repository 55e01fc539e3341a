"""What opens a payload channel: a secret that one end made for this connection alone, and gave the other over CURVE."""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass, field

from monarch_slurm.wire.sealed_records import KEY_BYTES, Opener, Sealer

ID_BYTES = 16
SECRET_BYTES = 32
PROOF_BYTES = 32

GREETING_BYTES = ID_BYTES + PROOF_BYTES
"""What the end that dials says first: which channel it opens, and that it holds its secret."""


@dataclass(frozen=True)
class ChannelKeys:
    """The secret of one channel, which is used for one connection, and the number that names it on the network."""

    id: bytes
    secret: bytes = field(repr=False)

    @staticmethod
    def make() -> ChannelKeys:
        """Return new keys."""
        return ChannelKeys(os.urandom(ID_BYTES), os.urandom(SECRET_BYTES))

    def greeting(self) -> bytes:
        """Return what the end that dials says."""
        return self.id + self._derived("dials")

    def answer(self) -> bytes:
        """Return what the end that listens says when it has seen `greeting`."""
        return self._derived("listens")

    def dialer(self) -> tuple[Sealer, Opener]:
        """Return what the end that dials seals and opens records with."""
        return Sealer(self._key("dials")), Opener(self._key("listens"))

    def listener(self) -> tuple[Sealer, Opener]:
        """Return what the end that listens seals and opens records with."""
        return Sealer(self._key("listens")), Opener(self._key("dials"))

    def _key(self, end: str) -> bytes:
        return self._derived(f"records of the end that {end}")[:KEY_BYTES]

    def _derived(self, purpose: str) -> bytes:
        return hmac.digest(self.secret, f"monarch_slurm payload channel: {purpose}".encode() + self.id, "sha256")
