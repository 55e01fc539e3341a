"""TCP transfers in adversity: an owner that trickles, strangers that idle, no descriptors left, large ones ahead."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from support import REPOSITORY

from monarch_slurm.rdma import tcp_protocol as protocol
from monarch_slurm.rdma.engine import Op, Target
from monarch_slurm.rdma.errors import RDMATimeoutError
from monarch_slurm.rdma.lanes import Lanes
from monarch_slurm.rdma.memory import memory_of
from monarch_slurm.rdma.tcp_client import TcpEngine
from monarch_slurm.rdma.workers import Workers
from monarch_slurm.wire.origin import Origin
from rdma.test_units import Served, soon

SECRET = b"s" * 32


class Trickle:
    """An owner that proves itself, and then answers a read with one byte at a time until the end."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.end = threading.Event()
        self.sent = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self.listener.accept()
        with connection:
            ours = os.urandom(protocol.NONCE_BYTES)
            connection.sendall(ours)
            theirs = connection.recv(64, socket.MSG_WAITALL)[: protocol.NONCE_BYTES]
            connection.sendall(protocol.proof(SECRET, b"server", theirs, ours))
            connection.recv(protocol.REQUEST.size, socket.MSG_WAITALL)
            connection.sendall(protocol.REPLY.pack(protocol.DONE, 10**6))
            while not self.end.wait(0.001):
                try:
                    connection.send(b"x")
                except OSError:
                    return  # it has given up
                self.sent += 1


@pytest.fixture
def trickle() -> Iterator[Trickle]:
    trickle = Trickle()
    yield trickle
    trickle.end.set()
    trickle.listener.close()


def test_the_deadline_holds_while_bytes_trickle(trickle: Trickle) -> None:
    engine = TcpEngine([trickle.listener.getsockname()], SECRET, 1, 2**20, Workers().run)
    local = memory_of(memoryview(bytearray(10**6)))
    with pytest.raises(RDMATimeoutError):
        engine.transfer([Op(False, local.address, 10**6, Target(0, 1, 0, 0, 10**6))], soon(0.3))
    assert trickle.sent < 10**6


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served(memoryview(bytearray(b"secret!!" * 10_000)))
    yield served
    served.server.close()


def test_members_come_first_where_strangers_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Origin, "is_own", False)  # as if all came from another user
    served = Served(memoryview(bytearray(b"secret!!")))
    with ExitStack() as idle:
        for _ in range(100):
            idle.enter_context(socket.create_connection(served.server.addresses[0]))
        local = memoryview(bytearray(8))
        served.engine().transfer([served.op(local)], soon(30))
        assert local == b"secret!!"
    served.server.close()


def test_a_small_transfer_does_not_wait_for_a_large_one(served: Served) -> None:
    """The large one has all connections of its share, and does not end before the small one has."""
    engine, local, small = served.engine(), memoryview(bytearray(8)), memoryview(bytearray(8))
    engine.transfer([served.op(local)], soon())
    with ExitStack() as held:
        busy = engine._lanes.take(99, soon())
        held.callback(engine._lanes.give, busy)
        assert len(busy) == 2, "the share of one batch"
        engine.transfer([served.op(small)], soon())
    assert small == b"secret!!"
    engine.close()


def test_lanes() -> None:
    made: list[int] = []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    lanes = Lanes(make, 2, 3)
    one = lanes.take(1, soon())
    two = lanes.take(2, soon())
    assert (one, two) == ([0], [1])
    three = lanes.take(2, soon())
    assert three == [2], "one beyond the share, for a batch that has none"
    with pytest.raises(RDMATimeoutError):
        lanes.take(1, soon(0.01))
    came: list[list[int]] = []
    waiting = threading.Thread(target=lambda: came.append(lanes.take(2, soon())))
    waiting.start()
    lanes.give(one + two)
    waiting.join(30)
    assert sorted(came[0]) == [0, 1]
    lanes.give(three)
    assert lanes.all == [0, 1, 2]


def test_a_process_without_descriptors_accepts_again_when_it_has_some() -> None:
    code = """
import logging, os, resource, socket, threading
from monarch_slurm.rdma.registry import Registry
from monarch_slurm.rdma.tcp_server import TcpServer
said = threading.Event()
class Handler(logging.Handler):
    def emit(self, record):
        print(record.getMessage()); said.set()
logging.getLogger("monarch_slurm.wire.guarded_listener").addHandler(Handler())
server = TcpServer(Registry(), ["127.0.0.1"], 1)
ours = [socket.socket(), socket.socket()]
top = max(int(fd) for fd in os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (top + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
full = []
try:
    while True: full.append(os.open("/dev/null", 0))
except OSError: pass
for connection in ours: connection.settimeout(60); connection.connect(server.addresses[0])
assert said.wait(60)
for fd in full: os.close(fd)
resource.setrlimit(resource.RLIMIT_NOFILE, (top + 20, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
for connection in ours: assert len(connection.recv(64)) == 32
print("served")
server.close()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    shortage, served = done.stdout.splitlines()
    assert shortage.startswith("the port for buffers can take no connection now"), done.stderr
    assert "ulimit -n" in shortage
    assert served == "served"
