"""What a proof is good for: one side, step, member and pair of nonces, and nothing else."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from monarch_slurm.train import proof

KEY = bytes(range(32))
SESSION = proof.Session(4, "replica_1:abc", b"r" * 32, b"d" * 32)


@pytest.mark.parametrize(
    ("changes", "key", "side", "said"),
    [
        ({"step": 5}, KEY, "donor", b"x"),
        ({"member": "replica_2:abc"}, KEY, "donor", b"x"),
        ({"receiver_nonce": b"d" * 32}, KEY, "donor", b"x"),
        ({"donor_nonce": b"r" * 32}, KEY, "donor", b"x"),
        ({"receiver_nonce": b"d" * 32, "donor_nonce": b"r" * 32}, KEY, "donor", b"x"),
        ({}, bytes(32), "donor", b"x"),
        ({}, KEY, "receiver", b"x"),
        ({}, KEY, "donor", b""),
    ],
)
def test_a_proof_is_good_for_one_thing(changes: dict[str, Any], key: bytes, side: str, said: bytes) -> None:
    made = SESSION.proof(KEY, "donor", b"x")
    assert SESSION.is_proof(made, KEY, "donor", b"x")
    assert not replace(SESSION, **changes).is_proof(made, key, side, said)


def test_both_ends_agree_on_the_session() -> None:
    receiver, donor = socket.socketpair()

    def filler(end: socket.socket) -> Callable[[memoryview], None]:
        def fill(buffer: memoryview) -> None:
            assert end.recv_into(buffer, len(buffer), socket.MSG_WAITALL) == len(buffer)

        return fill

    with receiver, donor:
        told: list[proof.Session] = []

        def ask(data: bytes) -> None:
            receiver.sendall(data)
            told.append(proof.answer(donor.sendall, filler(donor)))

        asked = proof.ask(7, "ä", ask, filler(receiver))
        again = proof.ask(7, "ä", ask, filler(receiver))
    assert told == [asked, again]
    assert len({asked.receiver_nonce, asked.donor_nonce, again.receiver_nonce, again.donor_nonce}) == 4
