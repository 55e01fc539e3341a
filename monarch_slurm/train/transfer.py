"""How a trainer's state gets from a healthy replica to one that joins: a torchft checkpoint transport of our own.

It differs from torchft's ``HTTPTransport`` in what matters on a cluster: it binds and advertises one given address
instead of every interface and the host's name, unpickles nothing (see `monarch_slurm.train.state`), serves nobody but
members of the quorum, and has the receiver check what came before anything is loaded.

The exchange is one TCP connection per receiver. Both ends first prove that they hold the receiver's key for this step
(see `monarch_slurm.train.proof`). Then the donor sends the snapshot as soon as it has that step's, and behind it the
snapshot's hash with a proof. The receiver hashes what comes while it comes. It takes the state only if its hash is the
one behind the snapshot, and the one that the donor has announced over the control plane.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from monarch_slurm.wire.limits import LimitError
from monarch_slurm.wire.task_limits import start_thread

# The library reads this once, when it is loaded; its default is ten lines of log for every sync.
os.environ.setdefault("RUST_LOG", "warn")

from torchft.checkpointing import CheckpointTransport

from monarch_slurm.train import proof, state
from monarch_slurm.train.addresses import in_url, listen
from monarch_slurm.wire.admission import PROOF_SECONDS
from monarch_slurm.wire.guarded_listener import GuardedListener, Visitor

logger = logging.getLogger(__name__)


class UntrustedStateError(state.StateError):
    """The state that came, or was to come, is not one that a donor has announced for a step of this run."""


@dataclass(frozen=True)
class Transfer:
    """One transfer as one side saw it.

    Attributes:
        step: manager step of the state.
        nbytes: bytes of its tensors.
        at: seconds since the epoch when the state was ready to be sent, or was received.
        seconds: time that taking the snapshot, or fetching it, took.
        receivers: replicas that it was meant for; 0 at the receiver.
        sha256: hash of the state, when it has been worked out.
    """

    step: int
    nbytes: int
    at: float
    seconds: float
    receivers: int
    sha256: Future[str]


@dataclass(frozen=True)
class _Expected:
    """The one state that this trainer may receive; see `StateTransport.expect`."""

    step: int
    member: str
    key: bytes
    announced: Callable[[], str] | None
    donor: str


@dataclass(frozen=True)
class _Staged:
    """A snapshot that is on offer."""

    step: int
    copy: Any
    sha256: Future[str]


class StateTransport(CheckpointTransport[Any]):  # type: ignore[misc]  # torchft has no types
    """Serves snapshots of this trainer's state to peers, and fetches theirs.

    A donor has to `admit` its receivers, and a receiver to `expect` the state: both are for one step, and for the keys
    that the quorum has given out.

    Args:
        address: IP address to bind and to advertise.
        timeout: seconds that a peer may be silent before its connection is given up.
        meshes: those of the replica, if its parameters are sharded.

    Attributes:
        began_at: seconds since the epoch when the first transfer began since this was last set to None.
        sent: snapshots offered, oldest first; whoever reads the list may empty it.
        received: states fetched, likewise.
    """

    def __init__(self, address: str, timeout: float, meshes: state.Meshes) -> None:
        self._timeout, self._meshes = timeout, meshes
        self._address = address
        self._admitted: tuple[int, dict[str, bytes]] | None = None
        self._expected: _Expected | None = None
        self._staged: _Staged | None = None
        self._hashed: tuple[int, Future[str]] | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._hasher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="state_hash")
        self._listener = GuardedListener(listen(address), "the state transfer", "hold no key of the quorum")
        self._port: int = self._listener.address[1]
        self.began_at: float | None = None
        self.sent: list[Transfer] = []
        self.received: list[Transfer] = []
        start_thread(threading.Thread(target=self._accept, name="state_server", daemon=True))

    def __repr__(self) -> str:
        staged = "nothing" if self._staged is None else f"step {self._staged.step}"
        return f"<StateTransport {self._address} port {self._port}, serving {staged}>"

    def metadata(self) -> str:
        """Return where the state is served: port and address. It holds no secret."""
        return f"{self._port} {self._address}"

    # ---- the donor

    def admit(self, step: int, keys: Mapping[str, bytes]) -> None:
        """Serve the state of ``step`` to those who prove one of ``keys``, and to nobody else any more.

        It may be called before or after `send_checkpoint`; what it admits ends with `disallow_checkpoint`.

        Args:
            step: manager step of the state.
            keys: for each receiver, by its member id in the quorum, 32 random bytes made for this quorum alone.

        Raises:
            ValueError: a key is too short or a member id too long.
        """
        for member, key in keys.items():
            _check_key(member, key)
        with self._changed:
            self._admitted = step, dict(keys)
            self._changed.notify_all()

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Take a snapshot and offer it to the peers until `disallow_checkpoint`; returns before they have it."""
        self.began_at = self.began_at or time.time()
        start = time.monotonic()
        copy = state.snapshot(state_dict)
        seconds = time.monotonic() - start
        staged = _Staged(step, copy, self._hasher.submit(state.digest, copy))
        with self._changed:
            self._staged, self._hashed = staged, (step, staged.sha256)
            self._changed.notify_all()
        self.sent.append(Transfer(step, state.size(copy), time.time(), seconds, len(dst_ranks), staged.sha256))

    def announced(self, step: int) -> str:
        """Return the hash of the snapshot of ``step``, for the donor to announce; waits until it has been taken.

        Raises:
            StateError: no snapshot of that step comes within the transport's time-out.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or (self._hashed is not None and self._hashed[0] >= step), self._timeout
            )
            hashed = self._hashed
        if hashed is None or hashed[0] != step:
            raise state.StateError(f"this trainer has no snapshot of step {step} whose hash it could announce")
        return hashed[1].result()

    def disallow_checkpoint(self) -> None:
        """Stop offering the snapshot. A peer that is being served keeps it: it is a copy, and nobody changes it."""
        with self._changed:
            self._staged = self._admitted = None

    # ---- the receiver

    def expect(self, step: int, member: str, key: bytes, announced: Callable[[], str] | None, donor: str = "") -> None:
        """Say which state the next `recv_checkpoint` may take; it takes no other.

        Args:
            step: manager step of the state.
            member: id of this trainer in the quorum.
            key: the key that the donor was given for it.
            announced: returns the hash that the donor has announced over the control plane; it may wait for that, and
                is called once the state has come. None takes the donor's word on the connection for it.
            donor: who sends it, for errors.

        Raises:
            ValueError: the key is too short or the member id too long.
        """
        _check_key(member, key)
        self._expected = _Expected(step, member, key, announced, donor)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Fetch a peer's state, once for each `expect`.

        Raises:
            OSError: the peer cannot be reached, is not the donor, or hung up: it is gone, or offers another step.
            UntrustedStateError: the step is not the expected one, or the hash is not that of what the donor announced.
            StateError: what it sent is no snapshot.
        """
        self.began_at = self.began_at or time.time()
        start = time.monotonic()
        expected, self._expected = self._expected, None
        port, _, address = metadata.partition(" ")
        if expected is None or expected.step != step:
            told = "none" if expected is None else f"that of step {expected.step}"
            raise UntrustedStateError(
                f"a state of step {step} was to be taken from {address}, but the quorum has named {told}; nothing was "
                "loaded"
            )
        with socket.create_connection((address, int(port)), timeout=self._timeout) as connection:
            session = self._prove_as_receiver(connection, expected)
            connection.settimeout(self._timeout)
            fill = _filler(connection)
            copy, sha256 = state.read_hashed(fill)
            sent = proof.receive(fill, proof.HASH_BYTES)
            proved = proof.receive(fill, proof.PROOF_BYTES)
        seconds = time.monotonic() - start
        where = f"{expected.donor or f'replica rank {src_rank}'} at {in_url(address)}:{port}"
        if not session.is_proof(proved, expected.key, "donor", sent):
            raise UntrustedStateError(
                f"the state of step {step} that {expected.member} got from {where} was changed on its way: it ends "
                "without the donor's proof; nothing was loaded"
            )
        announced = sent.hex() if expected.announced is None else expected.announced()
        for said, how in ((sent.hex(), "sent"), (announced, "announced")):
            if sha256 != said:
                raise UntrustedStateError(
                    f"the state of step {step} that {expected.member} got from {where} has the hash {sha256}, but the "
                    f"donor has {how} {said}; nothing was loaded"
                )
        known: Future[str] = Future()
        known.set_result(sha256)
        self.received.append(Transfer(step, state.size(copy), time.time(), seconds, 0, known))
        restored = state.restore(copy, self._meshes)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the state is loaded on another stream than this one
        return restored

    def _prove_as_receiver(self, connection: socket.socket, expected: _Expected) -> proof.Session:
        fill = _filler(connection, time.monotonic() + PROOF_SECONDS)
        session = proof.ask(expected.step, expected.member, connection.sendall, fill)
        connection.sendall(session.proof(expected.key, "receiver"))
        if not session.is_proof(proof.receive(fill, proof.PROOF_BYTES), expected.key, "donor"):
            raise ConnectionError("the process that answers does not have the donor's key; nothing was taken from it")
        return session

    def shutdown(self, wait: bool = True) -> None:
        """Close the server; connections being served end by themselves."""
        self._closed = True
        self._listener.close()
        with self._changed:
            self._changed.notify_all()
        self._hasher.shutdown(wait=wait)

    # ---- the server

    def _accept(self) -> None:
        while (visitor := self._listener.accept()) is not None:
            thread = threading.Thread(target=self._serve, args=(visitor,), name="state_sender", daemon=True)
            try:
                start_thread(thread)
            except LimitError as error:
                logger.warning("a connection to the state transfer is closed: %s", error)
                visitor.close()

    def _serve(self, visitor: Visitor) -> None:
        try:
            session, key = self._prove_as_donor(visitor.connection)
        except (OSError, ValueError) as error:
            if self._closed:
                visitor.close()
            else:
                visitor.refuse(str(error))
            return
        visitor.proved()
        try:
            visitor.connection.settimeout(self._timeout)
            self._send(visitor.connection, session, key)
        except OSError as error:
            logger.warning("sending the state to %s at %s failed: %s", session.member, visitor.origin, error)
        finally:
            visitor.close()

    def _prove_as_donor(self, connection: socket.socket) -> tuple[proof.Session, bytes]:
        """Return what was agreed with a receiver that has proved its key; the listener ends what takes too long.

        Raises:
            OSError: it hung up.
            ValueError: it has no key, or is no receiver at all.
        """
        fill = _filler(connection)
        session = proof.answer(connection.sendall, fill)
        proved = proof.receive(fill, proof.PROOF_BYTES)
        with self._changed:  # a receiver may hear of the quorum before the donor does
            self._changed.wait_for(
                lambda: self._closed or (self._admitted is not None and self._admitted[0] >= session.step),
                PROOF_SECONDS,
            )
            step, keys = self._admitted or (-1, {})
        key = keys.get(session.member)
        if step != session.step or key is None:
            raise ValueError(f"member {session.member!r} is not to get the state of step {session.step}")
        if not session.is_proof(proved, key, "receiver"):
            raise ValueError(f"it does not have the key of member {session.member!r}")
        connection.sendall(session.proof(key, "donor"))
        return session, key

    def _send(self, connection: socket.socket, session: proof.Session, key: bytes) -> None:
        staged = self._wait_for(session.step)
        if staged is None:
            return
        connection.sendall(state.encode_header(staged.copy))
        for tensor in state.tensors(staged.copy):
            connection.sendall(state.raw_bytes(tensor))
        sha256 = bytes.fromhex(staged.sha256.result())
        connection.sendall(sha256 + session.proof(key, "donor", sha256))

    def _wait_for(self, step: int) -> _Staged | None:
        """Return the snapshot of ``step``, None if it does not come; a joiner may ask before it is staged."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or (self._staged is not None and self._staged.step >= step), self._timeout
            )
            staged = self._staged
        return staged if staged is not None and staged.step == step else None


def _check_key(member: str, key: bytes) -> None:
    if len(key) != proof.KEY_BYTES:
        raise ValueError(f"the key of {member} has {len(key)} bytes, not {proof.KEY_BYTES}")
    if len(member.encode()) > proof.MAX_MEMBER_BYTES:
        raise ValueError(f"the member id {member} is longer than {proof.MAX_MEMBER_BYTES} bytes")


def _filler(connection: socket.socket, deadline: float | None = None) -> proof.Fill:
    """Return a function that fills a buffer from ``connection``, and raises when it hangs up.

    Args:
        deadline: of all that is read, on the monotonic clock; None leaves it to the connection's time-out.
    """

    def fill(buffer: memoryview) -> None:
        while buffer:
            if deadline is not None:
                connection.settimeout(max(deadline - time.monotonic(), 0.001))
            count = connection.recv_into(buffer)
            if count == 0:
                raise ConnectionError("the peer hung up before all had come")
            buffer = buffer[count:]

    return fill
