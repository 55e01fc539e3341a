"""TCP tunnels between procs: what dials a port on one host reaches an address that another host can dial."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

from monarch_slurm.actor import Actor, Channel, Point, Port, ProcMesh, context, current_rank, endpoint
from monarch_slurm.actor.context import set_context

_READ_BYTES = 256 * 1024
_BACKLOG = 16


class PortForwarder(Actor):
    """Listens on the loopback address of its host and carries connections to other procs; stop it to close them.

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
        """Open a tunnel between procs of the same rank: who dials ``127.0.0.1:dst_port`` where a proc of
        ``dst_proc_mesh`` runs reaches ``src_address`` (``host:port``) as the proc of ``src_proc_mesh`` sees it.

        Returns:
            The ports that are listened on, by rank; the system chooses for a ``dst_port`` of 0.

        Raises:
            ValueError: the meshes have different shapes, or an address has no port.
            OSError: a port is taken.
        """
        if dst_proc_mesh.sizes != src_proc_mesh.sizes:
            raise ValueError(f"meshes of the same shape expected, not {dst_proc_mesh.sizes} and {src_proc_mesh.sizes}")
        dialers = src_proc_mesh.spawn("dialer", _Dialer, src_address)
        listeners = dst_proc_mesh.spawn("listener", _Listener, dst_port, dialers)
        self._ends += [listeners, dialers]
        return list(listeners.port.call().get().values())


class _Dialer(Actor):
    """The far end: dials the address once per connection."""

    def __init__(self, address: str | Callable[[Point], str]) -> None:
        self._address = address(current_rank()) if callable(address) else address
        host, _, port = self._address.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"address {self._address!r}: host:port expected")
        self._target = host.strip("[]"), int(port)
        self._connections: dict[int, socket.socket] = {}

    @endpoint
    def open(self, number: int, back: Port[bytes]) -> None:
        """Connect; what comes from there goes to ``back``, and an empty message when it ends."""
        connection = socket.create_connection(self._target, timeout=30)
        connection.settimeout(None)
        self._connections[number] = connection
        threading.Thread(target=_pump, args=(connection, back.send), daemon=True).start()

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

    def __init__(self, port: int | Callable[[Point], int], dialers: Any) -> None:
        point = current_rank()
        self._socket = socket.create_server(("127.0.0.1", port(point) if callable(port) else port), backlog=_BACKLOG)
        self._dialer = dialers.slice(**dict(point))
        self._numbers = 0

    @endpoint
    def port(self) -> int:
        """Begin to accept, and return the port."""

        here = context()
        threading.Thread(target=self._accept, args=(here,), daemon=True).start()
        return int(self._socket.getsockname()[1])

    def _accept(self, here: Any) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            self._numbers += 1
            threading.Thread(target=self._carry, args=(here, connection, self._numbers), daemon=True).start()

    def _carry(self, here: Any, connection: socket.socket, number: int) -> None:

        set_context(here)
        port, receiver = Channel[bytes].open()
        with connection:
            try:
                self._dialer.open.call_one(number, port).get()
            except Exception:  # nobody listens there: the one who dialled sees its connection closed
                return
            sender = threading.Thread(
                target=_pump, args=(connection, lambda data: self._send(here, number, data)), daemon=True
            )
            sender.start()
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
        self._socket.shutdown(socket.SHUT_RDWR)  # else the thread that waits in accept keeps it open
        self._socket.close()


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
