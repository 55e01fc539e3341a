from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support import DEADLINE

from monarch_slurm.actor import Actor, ActorError, ProcMesh, current_rank, endpoint, this_host, this_proc
from monarch_slurm.job import PortForwarder


@pytest.fixture(scope="module")
def meshes() -> Iterator[tuple[ProcMesh, ProcMesh]]:
    both = this_host().spawn_procs({"x": 2}), this_host().spawn_procs({"x": 2})
    yield both
    for mesh in both:
        mesh.stop().get(DEADLINE)


@pytest.fixture
def server() -> Iterator[int]:
    """The port of a server that answers all that it gets with its digest."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    digest = hashlib.sha256()
                    while data := connection.recv(65536):
                        digest.update(data)
                    connection.sendall(digest.digest())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(DEADLINE)


def test_bytes_go_there_and_back(meshes: tuple[ProcMesh, ProcMesh], server: int) -> None:
    forwarder = this_proc().spawn("forwarder", PortForwarder)
    ports = forwarder.forward.call_one(meshes[0], server, meshes[1], "127.0.0.1:0").get(DEADLINE)
    assert len(set(ports)) == 2
    data = os.urandom(3_000_000)
    for port in (*ports, *ports):
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) == hashlib.sha256(data).digest()
            assert connection.recv(100) == b""
    forwarder.stop().get(DEADLINE)  # type: ignore[attr-defined]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ports[0]), timeout=DEADLINE)


def test_shapes_must_be_equal(meshes: tuple[ProcMesh, ProcMesh]) -> None:
    forwarder = this_proc().spawn("forwarder", PortForwarder)
    with pytest.raises(ActorError, match="same shape"):
        forwarder.forward.call_one(meshes[0], 1, meshes[1].slice(x=0), "127.0.0.1:0").get(DEADLINE)
    forwarder.stop().get(DEADLINE)  # type: ignore[attr-defined]


def test_nobody_listens_there(meshes: tuple[ProcMesh, ProcMesh]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        unused = taken.getsockname()[1]
    forwarder = this_proc().spawn("forwarder", PortForwarder)
    (port, _) = forwarder.forward.call_one(meshes[0], lambda _: unused, meshes[1], "127.0.0.1:0").get(DEADLINE)
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as connection:
        assert connection.recv(1) == b""
    forwarder.stop().get(DEADLINE)  # type: ignore[attr-defined]


class Listener(Actor):
    """Listens on the loopback address of its own network namespace and says who it is."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, args=(f"rank {current_rank().rank}".encode(),), daemon=True).start()

    def _serve(self, name: bytes) -> None:
        while True:
            connection, _ = self.socket.accept()
            with connection:
                connection.sendall(name)

    @endpoint
    def port(self) -> int:
        return int(self.socket.getsockname()[1])


def test_the_source_listens_and_the_destination_is_dialled(meshes: tuple[ProcMesh, ProcMesh]) -> None:
    destination, source = meshes
    services = list(destination.spawn("service", Listener).port.call().get(DEADLINE).values())  # type: ignore[attr-defined]
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        free = [probe.getsockname()[1] for probe in probes]
    forwarder = this_proc().spawn("forwarder", PortForwarder)
    ports = forwarder.forward.call_one(
        destination, lambda point: services[point["x"]], source, lambda point: f"localhost:{free[point['x']]}"
    ).get(DEADLINE)
    assert ports == free
    for rank, port in enumerate(ports):
        with socket.create_connection(("localhost", port), timeout=DEADLINE) as connection:
            assert connection.recv(100) == b"rank %d" % rank
    with pytest.raises(ActorError, match="Address already in use"):
        forwarder.forward.call_one(destination, services[0], source, f"localhost:{free[0]}").get(DEADLINE)
    forwarder.stop().get(DEADLINE)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("port", "address", "text"),
    [
        (0, "localhost:0", "port 0: a number from 1 to 65535"),
        (True, "localhost:0", "port True"),
        (65536, "localhost:0", "port 65536"),
        (1, "localhost", "address 'localhost': host:port expected"),
        (1, "localhost:x", "host:port expected"),
        (1, ":1", "host:port expected"),
        (1, 5, "address 5: host:port expected"),
        (lambda point: 0, "localhost:0", "port 0"),
        (1, lambda point: "nowhere", "address 'nowhere': host:port expected"),
    ],
)
def test_ports_and_addresses_that_are_none(
    meshes: tuple[ProcMesh, ProcMesh], port: Any, address: Any, text: str
) -> None:
    forwarder = this_proc().spawn("forwarder", PortForwarder)
    with pytest.raises(ActorError, match=text) as raised:
        forwarder.forward.call_one(meshes[0], port, meshes[1], address).get(DEADLINE)
    assert isinstance(raised.value.exception, ValueError)
    forwarder.stop().get(DEADLINE)  # type: ignore[attr-defined]
