"""How a trainer's state gets from a healthy replica to one that joins: a torchft checkpoint transport of our own.

It differs from torchft's ``HTTPTransport`` in what matters on a cluster: it binds and advertises one given address
instead of every interface and the host's name, unpickles nothing (see `monarch_slurm.train.state`), asks for a secret
that only the manager of the donor hands out, and can hash what it sends while it is being sent.

The exchange is one TCP connection per receiver: the receiver sends the secret and the step that it wants, 16 and 8
bytes; the donor answers with a snapshot as soon as it has that step's, or hangs up.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from monarch_slurm.wire.task_limits import start_thread

# The library reads this once, when it is loaded; its default is ten lines of log for every sync.
os.environ.setdefault("RUST_LOG", "warn")

from torchft.checkpointing import CheckpointTransport

from monarch_slurm.train import state
from monarch_slurm.train.addresses import listen

logger = logging.getLogger(__name__)

_REQUEST = struct.Struct(">16sq")


@dataclass(frozen=True)
class Transfer:
    """One transfer as one side saw it.

    Attributes:
        step: manager step of the state.
        nbytes: bytes of its tensors.
        at: seconds since the epoch when the state was ready to be sent, or was received.
        seconds: time that taking the snapshot, or fetching it, took.
        receivers: replicas that it was meant for; 0 at the receiver.
        sha256: hash of the state, when it has been worked out; None where it is not verified.
    """

    step: int
    nbytes: int
    at: float
    seconds: float
    receivers: int
    sha256: Future[str] | None


class StateTransport(CheckpointTransport[Any]):  # type: ignore[misc]  # torchft has no types
    """Serves snapshots of this trainer's state to peers, and fetches theirs.

    Args:
        address: IP address to bind and to advertise.
        timeout: seconds that a peer may be silent before its connection is given up.
        meshes: those of the replica, if its parameters are sharded.
        verify: hash every snapshot that is sent, on a thread of its own so that nobody waits for it.

    Attributes:
        began_at: seconds since the epoch when the first transfer began since this was last set to None.
        sent: snapshots offered, oldest first; whoever reads the list may empty it.
        received: states fetched, likewise.
    """

    def __init__(self, address: str, timeout: float, meshes: state.Meshes, *, verify: bool) -> None:
        self._timeout, self._meshes, self._verify = timeout, meshes, verify
        self._secret = secrets.token_bytes(16)
        self._address = address
        self._staged: tuple[int, Any] | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._hasher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="state_hash")
        self._server = listen(address)
        self._port: int = self._server.getsockname()[1]
        self.began_at: float | None = None
        self.sent: list[Transfer] = []
        self.received: list[Transfer] = []
        start_thread(threading.Thread(target=self._accept, name="state_server", daemon=True))

    def __repr__(self) -> str:
        staged = "nothing" if self._staged is None else f"step {self._staged[0]}"
        return f"<StateTransport {self._address} port {self._port}, serving {staged}>"

    def metadata(self) -> str:
        """Return where and with which secret the state is to be had; the donor's manager tells it to joining peers."""
        return f"{self._secret.hex()} {self._port} {self._address}"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Take a snapshot and offer it to the peers until `disallow_checkpoint`; returns before they have it."""
        self.began_at = self.began_at or time.time()
        start = time.monotonic()
        copy = state.snapshot(state_dict)
        with self._changed:
            self._staged = (step, copy)
            self._changed.notify_all()
        seconds = time.monotonic() - start
        sha256 = self._hasher.submit(state.digest, copy) if self._verify else None
        self.sent.append(Transfer(step, state.size(copy), time.time(), seconds, len(dst_ranks), sha256))

    def disallow_checkpoint(self) -> None:
        """Stop offering the snapshot. A peer that is being served keeps it: it is a copy, and nobody changes it."""
        with self._changed:
            self._staged = None

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Fetch a peer's state.

        Raises:
            OSError: the peer cannot be reached, or hung up: it is gone, or offers another step by now.
            StateError: what it sent is no snapshot.
        """
        self.began_at = self.began_at or time.time()
        start = time.monotonic()
        secret, port, address = metadata.split(" ")
        with socket.create_connection((address, int(port)), timeout=self._timeout) as connection:
            connection.sendall(_REQUEST.pack(bytes.fromhex(secret), step))
            copy = state.read_snapshot(lambda buffer: _fill(connection, buffer))
        seconds = time.monotonic() - start
        self.received.append(Transfer(step, state.size(copy), time.time(), seconds, 0, None))
        restored = state.restore(copy, self._meshes)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the state is loaded on another stream than this one
        return restored

    def shutdown(self, wait: bool = True) -> None:
        """Close the server; connections being served end by themselves."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._server.close()
        with self._changed:
            self._changed.notify_all()
        self._hasher.shutdown(wait=wait)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, peer = self._server.accept()
            except OSError:
                return
            start_thread(
                threading.Thread(target=self._serve, args=(connection, peer), name="state_sender", daemon=True)
            )

    def _serve(self, connection: socket.socket, peer: Any) -> None:
        try:
            with connection:
                connection.settimeout(self._timeout)
                request = bytearray(_REQUEST.size)
                _fill(connection, memoryview(request))
                secret, step = _REQUEST.unpack(request)
                if not hmac.compare_digest(secret, self._secret):
                    logger.warning("%s asked for the state without the secret", peer)
                    return
                copy = self._wait_for(step)
                if copy is None:
                    return
                connection.sendall(state.encode_header(copy))
                for tensor in state.tensors(copy):
                    connection.sendall(state.raw_bytes(tensor))
        except OSError as error:
            logger.warning("sending the state to %s failed: %s", peer, error)

    def _wait_for(self, step: int) -> Any:
        """Return the snapshot of ``step``, None if it does not come; a joiner may ask before it is staged."""

        def ready() -> bool:
            return self._closed or (self._staged is not None and self._staged[0] >= step)

        with self._changed:
            self._changed.wait_for(ready, timeout=self._timeout)
            staged = self._staged
        return staged[1] if staged is not None and staged[0] == step else None


def _fill(connection: socket.socket, buffer: memoryview) -> None:
    while buffer:
        count = connection.recv_into(buffer)
        if count == 0:
            raise ConnectionError("the peer hung up before the whole state had come")
        buffer = buffer[count:]
