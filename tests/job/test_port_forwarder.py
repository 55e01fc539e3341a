from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest
from support import DEADLINE

from monarch_slurm.actor import ActorError, ProcMesh, this_host, this_proc
from monarch_slurm.job import PortForwarder


@pytest.fixture
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
    ports = forwarder.forward.call_one(meshes[0], 0, meshes[1], f"127.0.0.1:{server}").get(DEADLINE)
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
        forwarder.forward.call_one(meshes[0], 0, meshes[1].slice(x=0), "127.0.0.1:1").get(DEADLINE)
    forwarder.stop().get(DEADLINE)  # type: ignore[attr-defined]


def test_nobody_listens_there(meshes: tuple[ProcMesh, ProcMesh]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        unused = taken.getsockname()[1]
    forwarder = this_proc().spawn("forwarder", PortForwarder)
    (port, _) = forwarder.forward.call_one(meshes[0], 0, meshes[1], lambda point: f"127.0.0.1:{unused}").get(DEADLINE)
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as connection:
        assert connection.recv(1) == b""
    forwarder.stop().get(DEADLINE)  # type: ignore[attr-defined]
