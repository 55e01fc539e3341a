"""The state transfer over real sockets: who gets what, and who gets nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from monarch_slurm.train import proof, state, transfer
from monarch_slurm.train.transfer import StateTransport, UntrustedStateError
from monarch_slurm.wire import admission

SECOND = timedelta(seconds=1)
KEY = bytes(range(32))
OTHER_KEY = bytes(32)


@pytest.fixture
def donor() -> Iterator[StateTransport]:
    transport = StateTransport("127.0.0.2", 5.0, {})
    yield transport
    transport.shutdown()


@pytest.fixture
def joiner() -> Iterator[StateTransport]:
    transport = StateTransport("127.0.0.3", 5.0, {})
    yield transport
    transport.shutdown()


def tree(value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((1000, 300), value), "step": 4}


def offer(donor: StateTransport, step: int = 4, value: float = 1.0, *members: str) -> None:
    donor.admit(step, dict.fromkeys(members or ("b",), KEY))
    donor.send_checkpoint([1], step, tree(value), SECOND)


def fetch(
    joiner: StateTransport,
    donor: StateTransport,
    step: int = 4,
    *,
    member: str = "b",
    key: bytes = KEY,
    announced: Callable[[], str] | None = None,
) -> Any:
    joiner.expect(step, member, key, announced or (lambda: donor.announced(step)), "replica a")
    return joiner.recv_checkpoint(0, donor.metadata(), step, SECOND)


def connect(donor: StateTransport) -> socket.socket:
    port, address = donor.metadata().split(" ")
    connection = socket.create_connection((address, int(port)))
    connection.settimeout(20.0)
    return connection


def rest_of(connection: socket.socket) -> bytes:
    """Return what comes until the other end hangs up."""
    came = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            came += piece
    return came


def test_a_state_is_sent_and_hashed(donor: StateTransport, joiner: StateTransport) -> None:
    live = tree()
    donor.admit(4, {"b": KEY})
    donor.send_checkpoint([1], 4, live, SECOND)
    live["w"].zero_()  # the donor may train on
    came = fetch(joiner, donor)
    assert state.digest(came) == state.digest(tree())
    (sent,), (received,) = donor.sent, joiner.received
    assert sent.sha256.result() == received.sha256.result() == donor.announced(4) == state.digest(came)
    assert (sent.step, sent.nbytes, sent.receivers) == (4, 1_200_000, 1)
    assert (received.step, received.nbytes) == (4, 1_200_000)


def test_without_an_announcement_the_hash_behind_the_state_counts(
    donor: StateTransport, joiner: StateTransport
) -> None:
    offer(donor)
    joiner.expect(4, "b", KEY, None)
    assert state.digest(joiner.recv_checkpoint(0, donor.metadata(), 4, SECOND)) == state.digest(tree())


@pytest.mark.parametrize("admitted_first", [False, True])
def test_a_joiner_may_ask_first(donor: StateTransport, joiner: StateTransport, admitted_first: bool) -> None:
    came: list[Any] = []
    if admitted_first:
        donor.admit(4, {"b": KEY})
    asking = threading.Thread(target=lambda: came.append(fetch(joiner, donor)))
    asking.start()
    offer(donor)
    asking.join()
    assert state.digest(came[0]) == state.digest(tree())


def test_several_joiners_get_the_same(donor: StateTransport, joiner: StateTransport) -> None:
    offer(donor, 4, 1.0, "b", "c")
    first = fetch(joiner, donor)
    second = fetch(joiner, donor, member="c")
    assert state.digest(first) == state.digest(second)


def test_another_step_is_refused(donor: StateTransport, joiner: StateTransport) -> None:
    offer(donor, 5)
    with pytest.raises(ConnectionError, match="hung up"):
        fetch(joiner, donor, 4)
    assert joiner.received == []


@pytest.mark.parametrize(
    ("member", "key"),
    [("b", OTHER_KEY), ("stranger", KEY), ("", KEY), ("two\nlines", KEY)],
    ids=["another key", "another member", "no member", "two lines"],
)
def test_who_is_no_member_of_the_quorum_gets_nothing(
    donor: StateTransport, joiner: StateTransport, caplog: pytest.LogCaptureFixture, member: str, key: bytes
) -> None:
    offer(donor)
    with pytest.raises(ConnectionError):
        fetch(joiner, donor, member=member, key=key)
    assert joiner.received == []
    assert state.digest(fetch(joiner, donor)) == state.digest(tree())
    donor.shutdown()
    (line,) = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert "refused 1 connection at the state transfer" in line
    assert f"1 from 127.0.0.1 (uid {os.getuid()})" in line
    assert "\n" not in line


def test_keys_are_for_one_quorum(donor: StateTransport, joiner: StateTransport) -> None:
    offer(donor)
    donor.admit(4, {"b": OTHER_KEY})
    with pytest.raises(ConnectionError):
        fetch(joiner, donor)
    assert state.digest(fetch(joiner, donor, key=OTHER_KEY)) == state.digest(tree())
    with pytest.raises(ValueError, match="has 5 bytes, not 32"):
        donor.admit(4, {"b": b"short"})
    with pytest.raises(ValueError, match="longer than 255 bytes"):
        joiner.expect(4, "b" * 256, KEY, None)


def test_nothing_is_served_after_the_sync(monkeypatch: pytest.MonkeyPatch, joiner: StateTransport) -> None:
    monkeypatch.setattr(transfer, "PROOF_SECONDS", 0.2)
    monkeypatch.setattr(admission, "PROOF_SECONDS", 0.2)
    donor = StateTransport("127.0.0.1", 0.2, {})
    offer(donor)
    donor.disallow_checkpoint()
    with pytest.raises(OSError, match=r"hung up|timed out"):
        fetch(joiner, donor)
    donor.shutdown()


def test_the_address_holds_no_secret_and_nothing_of_the_key_travels(donor: StateTransport) -> None:
    offer(donor)
    assert donor.metadata().split(" ")[1:] == ["127.0.0.2"]
    with connect(donor) as connection:
        sent: list[bytes] = []

        def send(data: bytes) -> None:
            sent.append(data)
            connection.sendall(data)

        def fill(buffer: memoryview) -> None:
            assert connection.recv_into(buffer, len(buffer), socket.MSG_WAITALL) == len(buffer)

        session = proof.ask(4, "b", send, fill)
        send(session.proof(KEY, "receiver"))
        came = proof.receive(fill, proof.PROOF_BYTES)
        assert session.is_proof(came, KEY, "donor")
        assert not session.is_proof(came, KEY, "receiver"), "a proof cannot be sent back to whoever made it"
        assert KEY not in b"".join(sent) + came + rest_of(connection)
    with connect(donor) as connection:  # what was overheard is of no use on another connection
        connection.sendall(sent[0])
        connection.recv(proof.NONCE_BYTES, socket.MSG_WAITALL)
        connection.sendall(sent[1])
        assert rest_of(connection) == b""


def test_a_stranger_gets_nothing_and_does_not_stay(
    donor: StateTransport, joiner: StateTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "PROOF_SECONDS", 0.5)
    offer(donor)
    said = [b"", b"\0", b"GET /checkpoint/4/full HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" * 41 + b"\xff" * 300]
    for bytes_ in said:
        with connect(donor) as stranger:
            stranger.sendall(bytes_)
            assert len(rest_of(stranger)) in (0, proof.NONCE_BYTES), "but for a nonce"
    assert state.digest(fetch(joiner, donor)) == state.digest(tree())


def test_a_state_that_nobody_announced_is_not_loaded(donor: StateTransport, joiner: StateTransport) -> None:
    offer(donor)
    with pytest.raises(UntrustedStateError) as caught:
        fetch(joiner, donor, announced=lambda: "f" * 64)
    for named in (
        "step 4",
        "that b got",
        "from replica a at 127.0.0.2:",
        "f" * 64,
        donor.announced(4),
        "nothing was loaded",
    ):
        assert named in str(caught.value)
    assert joiner.received == []


def test_a_step_that_the_quorum_has_not_named_is_not_asked_for(donor: StateTransport, joiner: StateTransport) -> None:
    offer(donor, 10**6)
    joiner.expect(4, "b", KEY, None)
    with pytest.raises(UntrustedStateError, match=r"state of step 1000000 .* has named that of step 4"):
        joiner.recv_checkpoint(0, donor.metadata(), 10**6, SECOND)
    with pytest.raises(UntrustedStateError, match="has named none"):  # what is expected is expected once
        joiner.recv_checkpoint(0, donor.metadata(), 4, SECOND)


def test_nothing_is_taken_from_an_impostor(joiner: StateTransport) -> None:
    impostor = StateTransport("127.0.0.2", 5.0, {})
    impostor.admit(4, {"b": OTHER_KEY})
    impostor.send_checkpoint([1], 4, tree(666.0), SECOND)
    with pytest.raises(ConnectionError):
        fetch(joiner, impostor)
    impostor.shutdown()
    with socket.create_server(("127.0.0.2", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(bytes(proof.NONCE_BYTES + proof.PROOF_BYTES) + state.encode_header(tree()))
                rest_of(connection)

        answering = threading.Thread(target=answer)
        answering.start()
        joiner.expect(4, "b", KEY, None)
        with pytest.raises(ConnectionError, match="does not have the donor's key"):
            joiner.recv_checkpoint(0, f"{server.getsockname()[1]} 127.0.0.2", 4, SECOND)
        answering.join()
    assert joiner.received == []


@pytest.mark.parametrize("place", [600_000, -40, -1])
def test_a_state_that_is_changed_on_its_way_is_not_loaded(
    donor: StateTransport, joiner: StateTransport, place: int
) -> None:
    offer(donor)
    with socket.create_server(("127.0.0.4", 0)) as server:

        def relay() -> None:
            receiver, _ = server.accept()
            with receiver, connect(donor) as sender:
                sender.sendall(receiver.recv(1024))  # what it asks for
                receiver.sendall(sender.recv(proof.NONCE_BYTES, socket.MSG_WAITALL))
                sender.sendall(receiver.recv(proof.PROOF_BYTES, socket.MSG_WAITALL))
                receiver.sendall(sender.recv(proof.PROOF_BYTES, socket.MSG_WAITALL))
                came = bytearray(rest_of(sender))
                came[place] ^= 1
                receiver.sendall(came)

        relaying = threading.Thread(target=relay)
        relaying.start()
        joiner.expect(4, "b", KEY, lambda: donor.announced(4), "replica a")
        with pytest.raises(UntrustedStateError, match=r"step 4 that b got from replica a .*nothing was loaded"):
            joiner.recv_checkpoint(0, f"{server.getsockname()[1]} 127.0.0.4", 4, SECOND)
        relaying.join()
    assert joiner.received == []


def test_a_donor_that_is_gone_is_told(joiner: StateTransport) -> None:
    donor = StateTransport("127.0.0.1", 1.0, {})
    donor.shutdown()
    with pytest.raises(OSError, match="refused"):
        fetch(joiner, donor)


def test_a_hash_that_does_not_come(joiner: StateTransport) -> None:
    donor = StateTransport("127.0.0.1", 0.1, {})
    with pytest.raises(state.StateError, match="no snapshot of step 4"):
        donor.announced(4)
    donor.shutdown()


def test_it_shows_itself(donor: StateTransport) -> None:
    assert "127.0.0.2" in repr(donor)
    assert "nothing" in repr(donor)
    offer(donor)
    assert "step 4" in repr(donor)
