"""The asking end of TCP transfers: a few connections to one owner share the chunks and ask ahead of the answers."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from monarch_slurm.rdma import tcp_protocol as protocol
from monarch_slurm.rdma.engine import Op, Target, remaining
from monarch_slurm.rdma.errors import BufferGoneError, PeerLostError, RDMAError, RDMATimeoutError
from monarch_slurm.rdma.lanes import Lanes
from monarch_slurm.rdma.memory import view_of
from monarch_slurm.rdma.registry import gone_text
from monarch_slurm.rdma.tcp_server import tune

_AHEAD_BYTES = 16 * 2**20
_AHEAD_REQUESTS = 64
_CONNECT_SECONDS = 5.0
_SPARE_STREAMS = 12
"""Connections to one owner beyond those of one batch, for others at the same time."""


class _Chunk(NamedTuple):
    write: bool
    address: int
    nbytes: int
    target: Target
    offset: int


class TcpEngine:
    """Transfers from and to one process. Connections are made when they are first needed.

    Args:
        addresses: IP addresses and ports of the owner, tried in turn.
        secret: the owner's.
        streams: how many connections one batch uses; several batches at a time use a few more.
        chunk_bytes: how large transfers are cut.
        spawn: runs a function on a thread.
    """

    name = "tcp"
    takes_devices = False

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        secret: bytes,
        streams: int,
        chunk_bytes: int,
        spawn: Callable[[Callable[[], None]], None],
    ) -> None:
        self._addresses = addresses
        self._secret = secret
        self._chunk_bytes = chunk_bytes
        self._spawn = spawn
        self._lanes: Lanes[_Stream] = Lanes(lambda: _Stream(self), max(1, streams), streams + _SPARE_STREAMS)
        self._lost = ""

    def transfer(self, ops: Sequence[Op], deadline: float) -> None:
        """See `Engine.transfer`."""
        chunks: deque[_Chunk] = deque()
        for op in ops:
            for start in range(0, op.nbytes, self._chunk_bytes):
                size = min(self._chunk_bytes, op.nbytes - start)
                chunks.append(_Chunk(op.write, op.address + start, size, op.target, op.offset + start))
        total = sum(op.nbytes for op in ops)
        streams = self._lanes.take(len(chunks) if total > self._chunk_bytes else 1, deadline)
        try:
            self._run(streams, chunks, deadline)
        finally:
            self._lanes.give(streams)

    def _run(self, streams: list[_Stream], chunks: deque[_Chunk], deadline: float) -> None:
        failures: list[BaseException] = []
        ended = threading.Semaphore(0)

        def work(stream: _Stream) -> None:
            try:
                stream.work(chunks, deadline)
            except BaseException as error:  # told to whoever waits for the transfer
                failures.append(error)
                chunks.clear()
            finally:
                ended.release()

        for stream in streams[1:]:
            self._spawn(lambda stream=stream: work(stream))  # type: ignore[misc]
        work(streams[0])
        for _ in streams:
            ended.acquire()
        if failures:
            raise self._explain(failures[0])

    def _explain(self, error: BaseException) -> BaseException:
        if self._lost:
            return PeerLostError(self._lost)
        if isinstance(error, TimeoutError):
            return RDMATimeoutError("the transfer was not complete within its timeout")
        if isinstance(error, (OSError, EOFError)):
            return PeerLostError(f"the connection to {self._addresses} broke: {str(error) or 'closed by the owner'}")
        return error

    def connect(self, deadline: float) -> socket.socket:
        """Return a new connection that has proved itself, and the owner to it."""
        failures = []
        for address in self._addresses:
            try:
                connection = socket.create_connection(address, timeout=min(remaining(deadline), _CONNECT_SECONDS))
            except OSError as error:
                failures.append(f"{address[0]} port {address[1]}: {error}")
                continue
            try:
                tune(connection)
                self._prove(connection, deadline)
            except (OSError, EOFError) as error:
                connection.close()
                failures.append(f"{address[0]} port {address[1]}: {str(error) or 'hung up'}")
                continue
            except BaseException:
                connection.close()
                raise
            return connection
        remaining(deadline)
        raise PeerLostError(f"cannot reach the owner of the buffer: {'; '.join(failures)}")

    def _prove(self, connection: socket.socket, deadline: float) -> None:
        theirs, ours = bytearray(protocol.NONCE_BYTES), os.urandom(protocol.NONCE_BYTES)
        _receive(connection, memoryview(theirs), deadline)
        connection.sendall(ours + protocol.proof(self._secret, b"client", bytes(theirs), ours))
        answer = bytearray(protocol.PROOF_BYTES)
        _receive(connection, memoryview(answer), deadline)
        if not hmac.compare_digest(answer, protocol.proof(self._secret, b"server", ours, bytes(theirs))):
            raise RDMAError("the process that answers does not know the owner's secret; refusing to talk to it")

    def lost(self, reason: str) -> None:
        """See `Engine.lost`."""
        self._lost = reason
        for stream in list(self._lanes.all):
            stream.interrupt()

    def close(self) -> None:
        """See `Engine.close`."""
        for stream in self._lanes.all:
            stream.close()


class _Stream:
    """One connection. Used by one thread at a time."""

    def __init__(self, engine: TcpEngine) -> None:
        self._engine = engine
        self._socket: socket.socket | None = None

    def interrupt(self) -> None:
        """Make every call on the connection end. For any thread."""
        connection = self._socket
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, which nobody uses."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def work(self, chunks: deque[_Chunk], deadline: float) -> None:
        """Take chunks and transfer them until there are none; the connection is given up when that fails."""
        if self._socket is None:
            self._socket = self._engine.connect(deadline)
        try:
            refused = self._work(self._socket, chunks, deadline)
        except BaseException:
            self._socket.close()
            self._socket = None
            raise
        if refused is not None:  # every answer has been read: the connection is whole
            raise refused

    def _work(self, connection: socket.socket, chunks: deque[_Chunk], deadline: float) -> RDMAError | None:
        ahead: deque[_Chunk] = deque()
        ahead_bytes = 0
        refused: RDMAError | None = None
        while True:
            chunk = _next(chunks) if refused is None else None
            # Answers are read before the direction changes: with data under way both ways, both ends could wait to
            # send.
            while ahead and (
                chunk is None
                or chunk.write is not ahead[0].write
                or len(ahead) >= _AHEAD_REQUESTS
                or ahead_bytes + chunk.nbytes > _AHEAD_BYTES
            ):
                done = ahead.popleft()
                ahead_bytes -= done.nbytes
                refused = self._take(connection, done, deadline) or refused
            if chunk is None:
                break
            connection.settimeout(remaining(deadline))
            self._ask(connection, chunk)
            ahead.append(chunk)
            ahead_bytes += chunk.nbytes
        if refused is not None:
            chunks.clear()
        return refused

    def _ask(self, connection: socket.socket, chunk: _Chunk) -> None:
        operation = protocol.WRITE if chunk.write else protocol.READ
        target = chunk.target
        connection.sendall(
            protocol.REQUEST.pack(operation, target.slot, target.key, chunk.offset, chunk.nbytes),
            socket.MSG_MORE if chunk.write else 0,
        )
        if chunk.write:
            connection.sendall(view_of(chunk.address, chunk.nbytes))

    def _take(self, connection: socket.socket, chunk: _Chunk, deadline: float) -> RDMAError | None:
        reply = bytearray(protocol.REPLY.size)
        _receive(connection, memoryview(reply), deadline)
        status, length = protocol.REPLY.unpack(reply)
        if status != protocol.DONE:
            return _refusal(status, chunk.target)
        if length != (0 if chunk.write else chunk.nbytes):
            raise RDMAError(f"the owner answered with {length} bytes where {chunk.nbytes} were asked for")
        if not chunk.write:
            _receive(connection, view_of(chunk.address, chunk.nbytes), deadline)
            trailer = bytearray(protocol.TRAILER.size)
            _receive(connection, memoryview(trailer), deadline)
            (status,) = protocol.TRAILER.unpack(trailer)
        return None if status == protocol.DONE else _refusal(status, chunk.target)


def _next(chunks: deque[_Chunk]) -> _Chunk | None:
    try:
        return chunks.popleft()
    except IndexError:
        return None


def _receive(connection: socket.socket, view: memoryview, deadline: float) -> None:
    while view:
        connection.settimeout(remaining(deadline))  # each time: bytes may come one by one
        got = connection.recv_into(view)
        if got == 0:
            raise EOFError
        view = view[got:]


def _refusal(status: int, target: Target) -> RDMAError:
    if status == protocol.GONE:
        return BufferGoneError(gone_text(target.slot))
    texts = {
        protocol.OUT_OF_RANGE: f"the transfer reaches past the end of buffer {target.slot}",
        protocol.READ_ONLY: f"buffer {target.slot} is read-only",
    }
    return RDMAError(texts.get(status, f"the owner of buffer {target.slot} refused the transfer (status {status})"))
