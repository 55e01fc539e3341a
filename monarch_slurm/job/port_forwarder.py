"""TCP tunnels between procs: who dials an address on one host reaches a port on the loopback address of another."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from monarch_slurm.actor import Actor, ActorError, Channel, Point, Port, ProcMesh, context, current_rank, endpoint
from monarch_slurm.actor.context import set_context
from monarch_slurm.wire.guarded_listener import GuardedListener, Visitor
from monarch_slurm.wire.limits import LimitError
from monarch_slurm.wire.task_limits import start_thread

_READ_BYTES = 256 * 1024
_BACKLOG = 128
_MOST_PER_ORIGIN, _MOST = 64, 256
"""Connections that are carried at a time, of one address or user and in all; each takes two threads at either end."""


class PortForwarder(Actor):
    """Carries TCP connections from one proc to another; stop it to close them.

    Spawn it on a proc of your own (``this_proc().spawn("forwarder", PortForwarder)``), then call `forward`.
    """

    def __init__(self) -> None:
        self._ends: list[Any] = []

    @endpoint
    def forward(
        self,
        dst_proc_mesh: ProcMesh,
        dst_port: int | Callable[[Point], int],
        src_proc_mesh: ProcMesh,
        src_address: str | Callable[[Point], str],
    ) -> list[int]:
        """Open a tunnel between procs of the same rank: each proc of ``src_proc_mesh`` listens at its ``src_address``
        (``host:port``, ``[IPv6]:port``) and carries what dials it to ``127.0.0.1:dst_port`` where the proc of
        ``dst_proc_mesh`` runs.

        Returns:
            The ports that are listened on, by rank; the system chooses one for port 0.

        Raises:
            ValueError: the meshes have different shapes, an address has no port, or a port is out of range.
            OSError: an address cannot be listened at.
        """
        if dst_proc_mesh.extent != src_proc_mesh.extent:
            raise ValueError(f"meshes of the same shape expected, not {dst_proc_mesh.sizes} and {src_proc_mesh.sizes}")
        if not callable(dst_port):
            _check_port(dst_port, 1)
        if not callable(src_address):
            _split(src_address)
        dialers = dst_proc_mesh.spawn("dialer", _Dialer)
        listeners = src_proc_mesh.spawn("listener", _Listener, dialers)
        try:
            dialers.set_port.call(dst_port).get()
            ports = list(listeners.listen.call(src_address).get().values())
        except ActorError as error:
            listeners.stop().get()
            dialers.stop().get()
            raise error.exception from None
        self._ends += [listeners, dialers]
        return ports


def _check_port(port: object, lowest: int) -> int:
    if type(port) is not int or not lowest <= port < 2**16:
        raise ValueError(f"port {port!r}: a number from {lowest} to 65535 expected")
    return port


def _split(address: object) -> tuple[str, int]:
    """Return host and port of ``host:port``."""
    host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not (host and colon and port.isdecimal()):
        raise ValueError(f"address {address!r}: host:port expected")
    return host.strip("[]"), _check_port(int(port), 0)


class _Dialer(Actor):
    """The far end: dials its port once per connection."""

    def __init__(self) -> None:
        self._port = 0
        self._connections: dict[int, socket.socket] = {}

    @endpoint
    def set_port(self, port: int | Callable[[Point], int]) -> None:
        """Say which port is dialled."""
        self._port = _check_port(port(current_rank()) if callable(port) else port, 1)

    @endpoint
    def open(self, number: int, back: Port[bytes]) -> None:
        """Connect; what comes from there goes to ``back``, and an empty message when it ends."""
        connection = socket.create_connection(("127.0.0.1", self._port), timeout=30)
        connection.settimeout(None)
        self._connections[number] = connection
        start_thread(threading.Thread(target=_pump, args=(connection, back.send), daemon=True))

    @endpoint
    def write(self, number: int, data: bytes) -> None:
        """Pass on ``data``; nothing means that no more comes."""
        _deliver(self._connections[number], data)

    @endpoint
    def close(self, number: int) -> None:
        """Forget a connection."""
        self._connections.pop(number).close()


class _Listener(Actor):
    """The near end: accepts connections, each on threads of its own."""

    def __init__(self, dialers: Any) -> None:
        self._guarded: GuardedListener | None = None
        self._lock = threading.Lock()
        self._carried: Counter[str] = Counter()
        """Connections by where they come from."""
        self._dialer = dialers.slice(**dict(current_rank()))
        self._numbers = 0

    @endpoint
    def listen(self, address: str | Callable[[Point], str]) -> int:
        """Begin to accept, and return the port."""
        host, port = _split(address(current_rank()) if callable(address) else address)
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(where[:2], family=family, backlog=_BACKLOG)
        self._guarded = GuardedListener(listening, f"the forwarded port {address}", "said nothing, or were too many")
        start_thread(threading.Thread(target=self._accept, args=(context(), self._guarded), daemon=True))
        return int(self._guarded.address[1])

    def _accept(self, here: Any, guarded: GuardedListener) -> None:
        while (visitor := guarded.accept()) is not None:
            group = visitor.origin.group
            with self._lock:
                is_full = self._carried[group] >= _MOST_PER_ORIGIN or self._carried.total() >= _MOST
                if not is_full or visitor.origin.is_own:
                    self._carried[group] += 1
                    is_full = False
            if is_full:
                visitor.refuse("too many at a time")
                continue
            self._numbers += 1
            carry = threading.Thread(target=self._carry, args=(here, visitor, self._numbers), daemon=True)
            try:
                start_thread(carry)
            except LimitError as error:
                visitor.refuse(str(error))
                self._end_of(visitor)

    def _end_of(self, visitor: Visitor) -> None:
        with self._lock:
            self._carried[visitor.origin.group] -= 1
        visitor.close()

    def _carry(self, here: Any, visitor: Visitor, number: int) -> None:
        try:
            self._carry_all(here, visitor, number)
        finally:
            self._end_of(visitor)

    def _carry_all(self, here: Any, visitor: Visitor, number: int) -> None:
        set_context(here)
        port, receiver = Channel[bytes].open()
        connection = visitor.connection

        def send(data: bytes) -> None:
            if data:
                visitor.proved()  # nothing else is asked of it: what it says is for the other end to judge
            self._send(here, number, data)

        with contextlib.ExitStack() as ends:
            ends.callback(visitor.close)
            try:
                self._dialer.open.call_one(number, port).get()
            except Exception:  # nobody listens there: the one who dialled sees its connection closed
                return
            sender = threading.Thread(target=_pump, args=(connection, send), daemon=True)
            start_thread(sender)
            while data := receiver.recv().get():
                _deliver(connection, data)
            _deliver(connection, b"")
            sender.join()
        self._dialer.close.call_one(number).get()

    def _send(self, here: Any, number: int, data: bytes) -> None:
        set_context(here)
        # Waited for, so that a slow receiver slows the sender down.
        self._dialer.write.call_one(number, data).get()

    def __cleanup__(self, error: Exception | None) -> None:
        if self._guarded is not None:
            self._guarded.close()


def _pump(connection: socket.socket, send: Callable[[bytes], Any]) -> None:
    """Send all that is read, and nothing as the last."""
    while True:
        try:
            data = connection.recv(_READ_BYTES)
        except OSError:
            data = b""
        send(data)
        if not data:
            return


def _deliver(connection: socket.socket, data: bytes) -> None:
    try:
        if data:
            connection.sendall(data)
        else:
            connection.shutdown(socket.SHUT_WR)
    except OSError:  # the one end has gone; the other hears so from its own side
        return
