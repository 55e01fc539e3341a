from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from monarch_slurm.wire import origin
from monarch_slurm.wire.origin import Origin, origin_of, uid_of_tcp
from monarch_slurm.wire.ports import listen_tcp

OTHER = 65534

AS_OTHER = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
if sys.argv[1] == "unix":
    there = socket.socket(socket.AF_UNIX)
    there.connect("\\0" + sys.argv[2])
else:
    there = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
    there.connect((sys.argv[1], int(sys.argv[2])))
print("connected", flush=True)
sys.stdin.read()
"""

by_root = pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, which takes root")


def without_sock_diag(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(origin, "_ask_kernel", refuse)


@pytest.fixture(params=["sock_diag", "proc"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to learn of a user."""
    if request.param == "proc":
        without_sock_diag(monkeypatch)


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize(("address", "dialled"), [("127.0.0.1",) * 2, ("::1",) * 2, ("::", "127.0.0.1")])
def test_own_connections(address: str, dialled: str) -> None:
    listener = listen_tcp(address, 4)
    with listener, socket.create_connection((dialled, listener.getsockname()[1])):
        accepted, _ = listener.accept()
        with accepted:
            found = origin_of(accepted)
    assert found == Origin(dialled, os.getuid())
    assert found.is_own
    assert str(found) == f"{dialled} (uid {os.getuid()})"


@by_root
@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "unix"])
def test_another_users_connections(address: str) -> None:
    if address == "unix":
        listener = socket.socket(socket.AF_UNIX)
        name = f"test-origin-{os.getpid()}"
        listener.bind(f"\0{name}")
        listener.listen()
    else:
        listener = listen_tcp(address, 4)
        name = str(listener.getsockname()[1])
    with listener:
        command = [sys.executable, "-I", "-c", AS_OTHER, address, name]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/") as stranger:
            assert stranger.stdout is not None
            stranger.stdout.readline()
            accepted, _ = listener.accept()
            with accepted:
                found = origin_of(accepted)
                assert stranger.stdin is not None
                stranger.stdin.close()
    assert found.uid == OTHER
    assert not found.is_own
    assert found.group == f"uid {OTHER}"
    assert found.pid == (stranger.pid if address == "unix" else 0)


def test_of_a_connection_that_is_closed_at_the_other_end_no_user_is_known() -> None:
    with listen_tcp("127.0.0.1", 4) as listener:
        there = socket.create_connection(listener.getsockname())
        near = there.getsockname()
        accepted, _ = listener.accept()
        with accepted:
            there.close()
            assert accepted.recv(1) == b""
            assert uid_of_tcp(near, accepted.getsockname()) is None
            assert origin._look_up(near, accepted.getsockname()) is None


def test_groups_of_origins() -> None:
    assert Origin("10.0.0.7").group == "10.0.0.7"
    assert Origin("2001:db8::1").group == Origin("2001:db8::ffff:2").group != Origin("2001:db8:0:1::1").group
    assert Origin("fe80::1%eth0").group == "fe80::/64"
    assert Origin("127.0.0.1", 5).group == Origin("", 5).group == "uid 5"
    assert origin._plain("::ffff:10.0.0.7") == "10.0.0.7"


def test_names_of_origins() -> None:
    assert str(Origin("10.0.0.7")) == "10.0.0.7"
    assert str(Origin("", 7, 8)) == "uid 7"
    assert "could not be read" in str(Origin(""))
