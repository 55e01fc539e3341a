from __future__ import annotations

import logging
import os
import queue
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from support import DEADLINE, REPOSITORY, wait_until

from monarch_slurm.wire import admission
from monarch_slurm.wire.guarded_listener import GuardedListener, Visitor
from monarch_slurm.wire.ports import listen_tcp

SECRET = b"secret\n"


class Echo:
    """Says back what comes after the secret, each connection on a thread of its own."""

    def __init__(self, **limits: int) -> None:
        self.guarded = GuardedListener(
            listen_tcp("127.0.0.1", 512), "the echo's port", "do not know its secret", **limits
        )
        self.took: queue.Queue[Visitor] = queue.Queue()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while (visitor := self.guarded.accept()) is not None:
            self.took.put(visitor)
            threading.Thread(target=self._serve, args=(visitor,), daemon=True).start()

    def _serve(self, visitor: Visitor) -> None:
        got = b""
        try:
            while len(got) < len(SECRET) and (data := visitor.connection.recv(len(SECRET) - len(got))):
                got += data
            if got == SECRET:
                visitor.proved()
                while data := visitor.connection.recv(100):
                    visitor.connection.sendall(data)
            elif len(got) == len(SECRET):
                visitor.refuse("a wrong secret")
        except OSError:
            pass
        finally:
            visitor.close()

    def dial(self) -> socket.socket:
        connection = socket.create_connection(self.guarded.address, timeout=DEADLINE)
        connection.settimeout(DEADLINE)
        return connection

    def works(self) -> bool:
        with self.dial() as connection:
            connection.sendall(SECRET + b"hello")
            return connection.recv(5) == b"hello"


@pytest.fixture(autouse=True)
def line_on_request(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line about strangers comes when a test asks for it."""
    monkeypatch.setattr(admission, "GATHER_SECONDS", 3600.0)
    caplog.set_level(logging.WARNING)


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.guarded.close()


def hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_whoever_knows_the_secret_stays(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "PROOF_SECONDS", 0.05)
    with echo.dial() as member:
        member.sendall(SECRET)
        wait_until(lambda: echo.guarded.unproved == 0 and not echo.took.empty(), "it has proved itself")
        with echo.dial() as silent:
            assert hung_up(silent)  # what came later is late
        member.sendall(b"x")
        assert member.recv(1) == b"x"
    assert echo.works()


def test_the_silent_and_the_slow_are_hung_up_on(
    echo: Echo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(admission, "PROOF_SECONDS", 0.2)
    strangers = [echo.dial() for _ in range(20)]
    for stranger in strangers[::2]:
        stranger.sendall(SECRET[:1])
    for stranger in strangers:
        assert hung_up(stranger)
        stranger.close()
    wait_until(lambda: echo.guarded.strangers.refused == 20)
    echo.guarded.strangers.flush()
    (line,) = caplog.messages
    assert f"20 from 127.0.0.1 (uid {os.getuid()})" in line


def test_a_wrong_secret(echo: Echo, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        with echo.dial() as stranger:
            stranger.sendall(b"another")
            assert hung_up(stranger)
    wait_until(lambda: echo.guarded.strangers.refused == 3)
    echo.guarded.strangers.flush()
    (line,) = caplog.messages
    assert line.startswith("refused 3 connections at the echo's port")
    assert line.endswith("(a wrong secret)")


FLOOD = """
import os, resource, socket, sys
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
os.setgroups([]); os.setgid(65534); os.setuid(65534)
held = []
for _ in range(int(sys.argv[2])):
    held.append(socket.socket())
    held[-1].connect(("127.0.0.1", int(sys.argv[1])))
print("there", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, which takes root")
def test_a_flood_of_another_user_keeps_nobody_out(caplog: pytest.LogCaptureFixture) -> None:
    echo = Echo(per_origin=16, total=32)
    with echo.dial() as early:
        command = [sys.executable, "-I", "-c", FLOOD, str(echo.guarded.address[1]), "400"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/") as flood:
            assert flood.stdout is not None
            flood.stdout.readline()
            wait_until(lambda: echo.guarded.strangers.refused == 400 - 16)
            assert echo.guarded.unproved == 16 + 1
            assert echo.works()
            early.sendall(SECRET + b"early")
            assert early.recv(5) == b"early"  # it was not a stranger of the flood's user
            assert flood.stdin is not None
            flood.stdin.close()
    wait_until(lambda: echo.guarded.unproved == 0, "what the flood held is given back")
    echo.guarded.close()
    (line,) = caplog.messages
    assert "384 from 127.0.0.1 (uid 65534)" in line


def test_who_hangs_up_first_is_no_stranger(echo: Echo) -> None:
    for _ in range(50):
        echo.dial().close()
    assert echo.works()
    wait_until(lambda: echo.guarded.unproved == 0)
    assert echo.guarded.strangers.refused == 0


def test_close_ends_accept(echo: Echo) -> None:
    ended = threading.Event()
    other = GuardedListener(listen_tcp("127.0.0.1", 4), "a port", "are strangers")

    def accept() -> None:
        assert other.accept() is None
        ended.set()

    threading.Thread(target=accept, daemon=True).start()
    other.close()
    assert ended.wait(DEADLINE)
    other.close()
    assert other.accept() is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(other.address)


WITHOUT_DESCRIPTORS = """
import logging, os, resource, socket, sys, threading, time
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests/wire"]
from test_guarded_listener import SECRET, Echo
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger().addHandler(handler)
echo = Echo()
assert echo.works()
dialled = [socket.socket() for _ in range(8)]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = []
try:
    while True:
        held.append(open("/dev/null"))
except OSError:
    pass
for one in dialled:
    one.settimeout(60)
    one.connect(echo.guarded.address)
    one.sendall(SECRET + b"x")
attempts = []
note = echo.guarded._shortages.note
echo.guarded._shortages.note = lambda error: (attempts.append(time.process_time()), note(error))
deadline = time.monotonic() + 60
while len(attempts) < 3:
    assert time.monotonic() < deadline
    time.sleep(0.01)
spent = attempts[2] - attempts[0]
for file in held:
    file.close()
assert [one.recv(1) for one in dialled] == [b"x"] * len(dialled)
assert echo.works()
(line,) = lines
assert "the echo's port can take no connection now" in line and "ulimit -n" in line, line
print("well", spent)
"""


def test_without_descriptors_it_waits_and_then_goes_on() -> None:
    command = [sys.executable, "-c", WITHOUT_DESCRIPTORS, str(REPOSITORY)]
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/tests"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    word, spent = run.stdout.split()
    assert word == "well"
    assert float(spent) < 0.5, "seconds of CPU between attempts: it waits"


def test_a_raised_limit_is_that_of_the_hard_one() -> None:
    code = (
        "import resource\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, min(hard, 4096)))\n"
        "from monarch_slurm.wire.limits import raise_descriptor_limit\n"
        "raise_descriptor_limit()\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    wanted = str(min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 4096))
    assert run.stdout.split() == [wanted, wanted]
