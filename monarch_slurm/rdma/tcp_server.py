"""The owner's end of TCP transfers: a few threads serve any number of connections.

Each connection is a generator that runs until its socket would block; it yields what it waits for.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import logging
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager

from monarch_slurm.rdma import tcp_protocol as protocol
from monarch_slurm.rdma.errors import BufferGoneError
from monarch_slurm.rdma.memory import host_bytes, view_of
from monarch_slurm.rdma.registry import Entry, Registry
from monarch_slurm.wire.guarded_listener import GuardedListener, Visitor
from monarch_slurm.wire.ports import listen_tcp
from monarch_slurm.wire.task_limits import start_thread

logger = logging.getLogger(__name__)

_BACKLOG = 256
_STEP = 4 * 2**20
"""Bytes of one system call, and of one piece of device memory."""
_SCRAP = 256 * 1024
_ZEROS = memoryview(bytes(_SCRAP))

Wants = Generator[int, None, None]
"""Yields the selector's event that it waits for."""
Holding = Callable[[], AbstractContextManager[None]]
"""Holds off the end of a buffer's drop during one system call."""


class TcpServer:
    """Serves the buffers of ``registry`` to peers that know `secret`.

    Args:
        registry: what can be reached.
        addresses: IP addresses to listen on, each at a port of its own.
        threads: how many serve.

    Raises:
        OSError: an address is none of this machine.
    """

    def __init__(self, registry: Registry, addresses: Sequence[str], threads: int) -> None:
        self.secret = secrets.token_bytes(32)
        self.refused = 0
        self._registry = registry
        self._listeners = [
            GuardedListener(listen_tcp(address, _BACKLOG), "the port for buffers", "do not know the secret")
            for address in addresses
        ]
        self.addresses = [listener.address[:2] for listener in self._listeners]
        self._workers = [_Worker(index) for index in range(max(1, threads))]
        self._next = itertools.cycle(self._workers)
        for listener in self._listeners:
            start_thread(threading.Thread(target=self._accept, args=(listener,), name="rdma-accept", daemon=True))

    def close(self) -> None:
        """Stop listening and drop all connections."""
        for listener in self._listeners:
            listener.close()
        for worker in self._workers:
            worker.stop()

    def _accept(self, listener: GuardedListener) -> None:
        while (visitor := listener.accept()) is not None:
            try:
                visitor.connection.setblocking(False)
                tune(visitor.connection)
            except OSError:  # it has hung up already
                visitor.close()
                continue
            next(self._next).add(visitor, self._serve(visitor))

    def _serve(self, visitor: Visitor) -> Wants:
        connection = visitor.connection
        if not (yield from self._handshake(connection)):
            self.refused += 1
            visitor.refuse("another secret")
            return
        visitor.proved()
        scrap = memoryview(bytearray(_SCRAP))
        header = memoryview(bytearray(protocol.REQUEST.size))
        while True:
            yield from _receive(connection, header)
            operation, slot, key, offset, length = protocol.REQUEST.unpack(header)
            entry, status = self._look(operation, slot, key, offset, length)
            if operation == protocol.WRITE:
                if entry is not None:
                    status = yield from self._take(connection, entry, offset, length, scrap)
                else:
                    yield from _discard(connection, length, scrap)
                yield from _send(connection, memoryview(protocol.REPLY.pack(status, 0)))
            elif operation == protocol.READ:
                reply = protocol.REPLY.pack(status, 0 if entry is None else length)
                yield from _send(connection, memoryview(reply), more=True)
                if entry is not None:
                    status = yield from self._give(connection, entry, offset, length)
                    yield from _send(connection, memoryview(protocol.TRAILER.pack(status)))
            else:
                return

    def _handshake(self, connection: socket.socket) -> Generator[int, None, bool]:
        ours = os.urandom(protocol.NONCE_BYTES)
        yield from _send(connection, memoryview(ours))
        answer = memoryview(bytearray(protocol.NONCE_BYTES + protocol.PROOF_BYTES))
        yield from _receive(connection, answer)
        theirs = bytes(answer[: protocol.NONCE_BYTES])
        expected = protocol.proof(self.secret, b"client", ours, theirs)
        if not hmac.compare_digest(expected, answer[protocol.NONCE_BYTES :]):
            return False
        yield from _send(connection, memoryview(protocol.proof(self.secret, b"server", theirs, ours)))
        return True

    def _look(self, operation: int, slot: int, key: int, offset: int, length: int) -> tuple[Entry | None, int]:
        try:
            entry = self._registry.find(slot, key)
        except BufferGoneError:
            return None, protocol.GONE
        if offset + length > entry.memory.nbytes:
            return None, protocol.OUT_OF_RANGE
        if operation == protocol.WRITE and entry.memory.readonly:
            return None, protocol.READ_ONLY
        return entry, protocol.DONE

    def _give(self, connection: socket.socket, entry: Entry, offset: int, length: int) -> Generator[int, None, int]:
        """Send all ``length`` bytes, zeros once the buffer is dropped; return the status."""
        stager = entry.memory.stager
        bounce = host_bytes(min(_STEP, length), stager) if stager else None
        done = 0
        while done < length:
            size = min(_STEP, length - done)
            address = entry.memory.address + offset + done if bounce is None else bounce.address
            if stager is not None and not self._with(entry, stager.to_host, offset + done, address, size):
                break
            left = yield from _send(connection, view_of(address, size), holding=lambda: self._registry.using(entry))
            done += size - left
            if left:
                break
        gone = done < length
        while done < length:
            done += len(piece := _ZEROS[: length - done])
            yield from _send(connection, piece)
        return protocol.GONE if gone else protocol.DONE

    def _take(
        self, connection: socket.socket, entry: Entry, offset: int, length: int, scrap: memoryview
    ) -> Generator[int, None, int]:
        """Receive all ``length`` bytes, for nothing once the buffer is dropped; return the status."""
        stager = entry.memory.stager
        bounce = host_bytes(min(_STEP, length), stager) if stager else None
        done = 0
        while done < length:
            size = min(_STEP, length - done)
            address = entry.memory.address + offset + done if bounce is None else bounce.address
            left = yield from _receive(connection, view_of(address, size), lambda: self._registry.using(entry))
            done += size - left
            if left or (
                stager is not None and not self._with(entry, stager.from_host, offset + done - size, address, size)
            ):
                yield from _discard(connection, length - done, scrap)
                return protocol.GONE
        return protocol.DONE

    def _with(self, entry: Entry, copy: Callable[[int, int, int], None], *arguments: int) -> bool:
        """Copy from or to a device, unless the buffer is dropped: then return False."""
        try:
            with self._registry.using(entry):
                copy(*arguments)
        except BufferGoneError:
            return False
        return True


class _Worker:
    """A thread that runs connections."""

    def __init__(self, index: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._new: list[tuple[Visitor, Wants]] = []
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._stopping = False
        start_thread(threading.Thread(target=self._run, name=f"rdma-serve-{index}", daemon=True))

    def add(self, visitor: Visitor, serve: Wants) -> None:
        self._new.append((visitor, serve))
        os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select():
                if key.fd == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
                else:
                    visitor, serve = key.data
                    self._step(visitor, serve, key.events)
            while self._new:
                visitor, serve = self._new.pop()
                self._selector.register(visitor.connection, selectors.EVENT_READ, (visitor, serve))
                self._step(visitor, serve, selectors.EVENT_READ)
        for key in list(self._selector.get_map().values()):
            if key.fd != self._wake_fd:
                self._end(*key.data)
        self._selector.close()

    def _step(self, visitor: Visitor, serve: Wants, events: int) -> None:
        try:
            wanted = next(serve)
        except (StopIteration, EOFError, OSError, BufferGoneError):
            self._end(visitor, serve)
            return
        except Exception:
            logger.exception("a TCP transfer failed on the owner's side")
            self._end(visitor, serve)
            return
        if wanted != events:
            self._selector.modify(visitor.connection, wanted, (visitor, serve))

    def _end(self, visitor: Visitor, serve: Wants) -> None:
        serve.close()
        self._selector.unregister(visitor.connection)
        visitor.close()


def tune(connection: socket.socket) -> None:
    """Set what both ends want of a connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


def _try(call: object, *arguments: object) -> int:
    try:
        return call(*arguments)  # type: ignore[operator, no-any-return]
    except (BlockingIOError, InterruptedError):
        return -1


def _receive(
    connection: socket.socket, view: memoryview, holding: Holding = contextlib.nullcontext
) -> Generator[int, None, int]:
    """Fill ``view``; return how many bytes did not come, since ``holding`` said that the buffer is gone."""
    while view:
        try:
            with holding():
                got = _try(connection.recv_into, view)
        except BufferGoneError:
            return len(view)
        if got == 0:
            raise EOFError
        if got < 0:
            yield selectors.EVENT_READ
        else:
            view = view[got:]
    return 0


def _discard(connection: socket.socket, length: int, scrap: memoryview) -> Wants:
    while length:
        piece = scrap[: min(length, len(scrap))]
        yield from _receive(connection, piece)
        length -= len(piece)


def _send(
    connection: socket.socket, view: memoryview, more: bool = False, holding: Holding = contextlib.nullcontext
) -> Generator[int, None, int]:
    """Send ``view``; return how many bytes were not sent, since ``holding`` said that the buffer is gone."""
    while view:
        try:
            with holding():
                sent = _try(connection.send, view, socket.MSG_MORE if more else 0)
        except BufferGoneError:
            return len(view)
        if sent < 0:
            yield selectors.EVENT_WRITE
        else:
            view = view[sent:]
    return 0
