"""The state transfer over real sockets: who gets what, and who gets nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from monarch_slurm.train import state
from monarch_slurm.train.transfer import StateTransport

SECOND = timedelta(seconds=1)


@pytest.fixture
def donor() -> Iterator[StateTransport]:
    transport = StateTransport("127.0.0.2", 5.0, {}, verify=True)
    yield transport
    transport.shutdown()


@pytest.fixture
def joiner() -> Iterator[StateTransport]:
    transport = StateTransport("127.0.0.3", 5.0, {}, verify=True)
    yield transport
    transport.shutdown()


def tree(value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((1000, 300), value), "step": 4}


def test_a_state_is_sent_and_hashed(donor: StateTransport, joiner: StateTransport) -> None:
    live = tree()
    donor.send_checkpoint([1], 4, live, SECOND)
    live["w"].zero_()  # the donor may train on
    came = joiner.recv_checkpoint(0, donor.metadata(), 4, SECOND)
    assert state.digest(came) == state.digest(tree())
    (sent,), (received,) = donor.sent, joiner.received
    assert sent.sha256 is not None
    assert sent.sha256.result() == state.digest(came)
    assert (sent.step, sent.nbytes, sent.receivers) == (4, 1_200_000, 1)
    assert (received.step, received.nbytes) == (4, 1_200_000)


def test_nothing_is_hashed_unless_asked_for() -> None:
    transport = StateTransport("127.0.0.1", 1.0, {}, verify=False)
    transport.send_checkpoint([1], 0, tree(), SECOND)
    assert transport.sent[0].sha256 is None
    transport.shutdown()


def test_a_joiner_may_ask_first(donor: StateTransport, joiner: StateTransport) -> None:
    came: list[Any] = []
    asking = threading.Thread(target=lambda: came.append(joiner.recv_checkpoint(0, donor.metadata(), 4, SECOND)))
    asking.start()
    donor.send_checkpoint([1], 4, tree(), SECOND)
    asking.join()
    assert state.digest(came[0]) == state.digest(tree())


def test_several_joiners_get_the_same(donor: StateTransport, joiner: StateTransport) -> None:
    donor.send_checkpoint([1, 2], 4, tree(), SECOND)
    first = joiner.recv_checkpoint(0, donor.metadata(), 4, SECOND)
    second = joiner.recv_checkpoint(0, donor.metadata(), 4, SECOND)
    assert state.digest(first) == state.digest(second)


def test_another_step_is_refused(donor: StateTransport, joiner: StateTransport) -> None:
    donor.send_checkpoint([1], 5, tree(), SECOND)
    with pytest.raises(ConnectionError, match="hung up"):
        joiner.recv_checkpoint(0, donor.metadata(), 4, SECOND)
    assert joiner.received == []


def test_nothing_is_served_after_the_sync() -> None:
    donor = StateTransport("127.0.0.1", 0.2, {}, verify=False)
    donor.send_checkpoint([1], 4, tree(), SECOND)
    donor.disallow_checkpoint()
    joiner = StateTransport("127.0.0.1", 5.0, {}, verify=False)
    with pytest.raises(ConnectionError):
        joiner.recv_checkpoint(0, donor.metadata(), 4, SECOND)
    donor.shutdown()
    joiner.shutdown()


def test_a_stranger_gets_nothing(donor: StateTransport, joiner: StateTransport) -> None:
    donor.send_checkpoint([1], 4, tree(), SECOND)
    secret, port, address = donor.metadata().split(" ")
    with pytest.raises(ConnectionError):
        joiner.recv_checkpoint(0, f"{'00' * 16} {port} {address}", 4, SECOND)
    with socket.create_connection((address, int(port))) as stranger:
        stranger.sendall(b"GET /checkpoint/4/full HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert len(secret) == 32


def test_a_donor_that_is_gone_is_told(joiner: StateTransport) -> None:
    donor = StateTransport("127.0.0.1", 1.0, {}, verify=False)
    metadata = donor.metadata()
    donor.shutdown()
    with pytest.raises(OSError, match="refused"):
        joiner.recv_checkpoint(0, metadata, 4, SECOND)


def test_it_shows_itself(donor: StateTransport) -> None:
    assert "127.0.0.2" in repr(donor)
    assert "nothing" in repr(donor)
    donor.send_checkpoint([1], 4, tree(), SECOND)
    assert "step 4" in repr(donor)
