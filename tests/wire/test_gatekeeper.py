"""Strangers at a ZeroMQ port: members talk and join meanwhile, nothing stays behind, one line says who."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from support import DEADLINE, REPOSITORY, wait_until

from monarch_slurm.wire import Gatekeeper, Invitation, JobKeys, Loop, admission, sockets
from monarch_slurm.wire.limits import descriptors_in_use
from monarch_slurm.wire.sockets import bind_tcp, connect_tcp, make_dealer, make_router

MANY = 200
OTHER = 65534

MODES = {
    "idle": b"",
    "garbage": os.urandom(4096),
    "huge": b"\xff" * 8 + b"\x7f" * 64,
    "http": b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999\r\n\r\n",
    "slow": b"\xff",
    "zmq": b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32),
    "tcpstore": b"\x00\x3c\x85\xf7\xce\x01" + b"\xff\xff\xff\xff\xff\xff\xff\x0f" * 2,
}

AT_ONCE = {"garbage", "huge", "http", "tcpstore"}

FLOOD = """
import os, socket, sys
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
held = []
for _ in range(int(sys.argv[2])):
    one = socket.socket()
    one.connect(("127.0.0.1", int(sys.argv[1])))
    held.append(one)
    try:
        one.send(bytes.fromhex(sys.argv[3]))
    except OSError:
        pass
print("there", flush=True)
sys.stdin.read()
"""


class Server:
    """Says back what members send."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = make_router(self.context)
        keys = JobKeys.make()
        self.gatekeeper = Gatekeeper(self.context, self.router, keys, "the test's port")
        address = bind_tcp(self.router, "127.0.0.1", keys)
        self.port = int(address.rpartition(":")[2])
        self.invitation = Invitation(address, keys.server_public, keys.agent_public, keys.agent_secret)
        self.loop.call_soon(lambda: self.gatekeeper.attach(self.loop))
        self.loop.call_soon(lambda: self.loop.add_reader(int(self.router.getsockopt(zmq.FD)), self._read))
        self.loop.call_soon(self._read)
        self.loop.start("test-server")
        self._dialled: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._members = 0

    def _read(self) -> None:
        while True:
            try:
                self.router.send_multipart(self.router.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return

    def join(self) -> zmq.Socket[bytes]:
        self._members += 1
        member = make_dealer(self._dialled, f"member{self._members}")
        connect_tcp(member, self.invitation)
        assert answers(member)
        return member

    def close(self) -> None:
        self.loop.stop()
        self.loop.join(5)
        self.gatekeeper.close()
        self.context.destroy(linger=0)
        self._dialled.destroy(linger=0)


def answers(member: zmq.Socket[bytes]) -> bool:
    member.send(b"hello")
    return bool(member.poll(DEADLINE * 1000)) and member.recv() == b"hello"


@pytest.fixture
def server(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(admission, "GATHER_SECONDS", 3600.0)  # the line comes when it is asked for
    monkeypatch.setattr(sockets, "SILENT_SECONDS", 1)
    server = Server()
    yield server
    server.close()


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, which takes root")
@pytest.mark.parametrize("mode", MODES)
def test_a_flood(server: Server, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    early = server.join()
    before = descriptors_in_use()
    command = [sys.executable, "-I", "-c", FLOOD, str(server.port), str(MANY), MODES[mode].hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/") as flood:
        assert flood.stdout is not None
        flood.stdout.readline()
        assert answers(early)
        late = server.join()
        enough = MANY - admission.MAX_PER_ORIGIN
        wait_until(lambda: server.gatekeeper.strangers.refused >= enough, "those that are too many are refused")
        assert server.gatekeeper.unproved <= admission.MAX_PER_ORIGIN + 2  # members are forgotten a moment later
        assert answers(early)
        assert answers(late)
        assert flood.stdin is not None
        flood.stdin.close()
    server.gatekeeper.strangers.flush()
    (line,) = caplog.messages
    assert "at the test's port" in line
    if mode in AT_ONCE:  # libzmq closes these before anybody can ask where they come from
        assert f"(uid {OTHER})" in line or "could not be read" in line
    else:
        assert f"(uid {OTHER})" in line
    # Of a connection with a late member this process has one end or both.
    wait_until(lambda: descriptors_in_use() <= before + 16, "descriptors are given back")
    server.join()


def test_members_are_no_strangers_however_many_of_one_user(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether they have proved themselves the kernel tells, when their number makes anybody ask."""
    monkeypatch.setattr("monarch_slurm.wire.origin.Origin.is_own", False)
    members = [server.join() for _ in range(admission.MAX_PER_ORIGIN + 20)]
    assert all(answers(member) for member in members)
    assert server.gatekeeper.refused == 0
    assert caplog.messages == []


WITHOUT_DESCRIPTORS = """
import logging, os, resource, subprocess, sys, time
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests/wire", sys.argv[1] + "/tests"]
from test_gatekeeper import Server, answers
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger().addHandler(handler)
server = Server()
member = server.join()
dial = (
    "import socket, sys; held = []\\n"
    "sys.stdin.readline()\\n"
    "for _ in range(20):\\n"
    "    held.append(socket.create_connection(('127.0.0.1', int(sys.argv[1])))); held[-1].send(b'\\\\xff')\\n"
    "print('there', flush=True); sys.stdin.read()"
)
stranger = subprocess.Popen(
    [sys.executable, "-c", dial, str(server.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
)
resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
full = []
try:
    while True:
        full.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
stranger.stdin.write(b"go\\n")
stranger.stdin.flush()
assert stranger.stdout.readline() == b"there\\n"
deadline = time.monotonic() + 60
while not lines:
    assert time.monotonic() < deadline
    time.sleep(0.01)
assert answers(member)
for fd in full:
    os.close(fd)
assert answers(server.join())
stranger.stdin.close()
stranger.wait()
shortages = [line for line in lines if "can take no connection now" in line]
assert len(shortages) == 1 and "the test's port" in shortages[0] and "ulimit -n" in shortages[0], lines
print("well")
server.close()
"""


def test_without_descriptors_it_tells_so_and_takes_connections_again_when_there_are_some() -> None:
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/tests"}
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS, str(REPOSITORY)],
        capture_output=True, text=True, timeout=200, check=False, env=environment,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout == "well\n", run.stderr
