from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support import DEADLINE, wait_until

from monarch_slurm.host.tunnel import WINDOW_BYTES, Tunnel
from monarch_slurm.wire import pack, unpack


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """A server that sends back what it gets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(connection: socket.socket) -> None:
            with connection:
                try:
                    while data := connection.recv(65536):
                        connection.sendall(data)
                except OSError:  # the other end has hung up
                    return

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)


class Pair:
    """Both ends of a tunnel; what is on its way from here to there, at most."""

    def __init__(self, default: tuple[str, int]) -> None:
        self.most = 0
        self._open = 0
        self.here = Tunnel(self._to_there, 0, lambda: default)
        self.there = Tunnel(lambda packet: self.here.take(self._note(unpack(pack(packet)))), 1, None)

    def _to_there(self, packet: dict[str, Any]) -> None:
        if packet["op"] == "data":
            self._open += len(packet["data"])
            self.most = max(self.most, self._open)
        self.there.take(unpack(pack(packet)))

    def _note(self, packet: dict[str, Any]) -> dict[str, Any]:
        if packet["op"] == "ack":
            self._open -= packet["bytes"]
        return packet

    def is_idle(self) -> bool:
        return not self.here._connections and not self.there._connections


@pytest.fixture
def pair(echo: tuple[str, int]) -> Iterator[Pair]:
    made = Pair(echo)
    yield made
    made.here.close()
    made.there.close()
    wait_until(lambda: not made.here._loop.is_running() and not made.there._loop.is_running())


def dial(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE)


def test_connections_of_both_directions(pair: Pair, echo: tuple[str, int]) -> None:
    for port in (pair.here.listen("127.0.0.1", echo), pair.there.listen("127.0.0.1", None)):
        with dial(port) as one, dial(port) as other:
            for text in (b"first", b"second"):
                one.sendall(text)
                other.sendall(text.upper())
                assert one.recv(100) == text
                assert other.recv(100) == text.upper()
        wait_until(pair.is_idle, "both ends have closed")


def test_one_who_does_not_read_holds_up_nobody_else(pair: Pair, echo: tuple[str, int]) -> None:
    port = pair.here.listen("127.0.0.1", echo)
    with dial(port) as stuck, dial(port) as other:
        stuck.settimeout(0.2)
        with pytest.raises(TimeoutError):
            stuck.sendall(bytes(100 << 20))
        other.sendall(b"still here")
        assert other.recv(100) == b"still here"
        assert pair.most <= WINDOW_BYTES + 65536 + 100


def test_much_comes_whole(pair: Pair) -> None:
    port = pair.there.listen("127.0.0.1", None)
    data = bytes(range(256)) * 4 * 4096
    with dial(port) as one:
        threading.Thread(target=one.sendall, args=(data,)).start()
        received = bytearray()
        while len(received) < len(data):
            received += one.recv(1 << 20)
    assert received == data


def test_where_nobody_listens(pair: Pair) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = probe.getsockname()
    for port in (pair.here.listen("127.0.0.1", nobody), pair.here.listen("127.0.0.1", None)):
        with dial(port) as one:
            assert one.recv(10) == b""
    wait_until(pair.is_idle)


def test_packets_of_connections_that_are_closed_are_dropped(pair: Pair) -> None:
    for operation in ("data", "ack", "close"):
        pair.here.take({"op": operation, "id": 99, "data": b"x", "bytes": 1})
    pair.here.take({"op": "ping"})
    assert pair.is_idle()
