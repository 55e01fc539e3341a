from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from support import wait_until

from monarch_slurm.wire import Loop
from monarch_slurm.wire.console import (
    MAX_SESSIONS,
    Console,
    ConsoleError,
    Session,
    connect_console,
    find_consoles,
)


def echo(session: Session, request: dict[str, Any]) -> None:
    while request is not None:
        session.send({"you said": request})
        request = session.receive()  # type: ignore[assignment]


@pytest.fixture
def name() -> Iterator[str]:
    """The name of a console of this process."""
    before = find_consoles()
    loop = Loop()
    console = Console(loop, {"pid": os.getpid()}, {"echo": echo})
    loop.start("test")
    yield next(name for name in find_consoles() if name not in before and f"/{os.getpid()}-" in name)
    loop.stop()
    loop.join(5)
    console.close()


def test_a_terminal_and_a_program_talk(name: str) -> None:
    session, about, pid = connect_console(name)
    assert (about, pid) == ({"pid": os.getpid()}, os.getpid())
    session.send({"service": "echo"})
    assert session.receive() == {"you said": {"service": "echo"}}
    session.send({"long": "x" * 3_000_000})
    assert session.receive() == {"you said": {"long": "x" * 3_000_000}}
    session.close()


def test_an_unknown_service_is_refused(name: str) -> None:
    session, _, _ = connect_console(name)
    session.send({"service": "run"})
    answer = session.receive()
    assert answer is not None
    assert "no service 'run'" in answer["error"]
    assert session.receive() is None
    session.close()


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", struct.pack("<I", 2**31), struct.pack("<I", 3) + b"\x93\x01\x02", b"\x01", b""],
)
def test_garbage_ends_its_own_session_only(name: str, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"\0{name}")
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(20)
        with contextlib.suppress(ConnectionResetError):  # hung up on before all was read
            while stranger.recv(4096):
                pass
    session, about, _ = connect_console(name)
    assert about is not None
    session.close()


def test_terminals_that_do_nothing_do_not_pile_up(name: str) -> None:
    idle = [connect_console(name)[0] for _ in range(MAX_SESSIONS)]
    with pytest.raises(ConsoleError, match="hung up"):
        connect_console(name)
    for session in idle:
        session.close()

    def free() -> bool:
        try:
            connect_console(name)[0].close()
        except ConsoleError:
            return False
        return True

    wait_until(free, "room for another terminal")


def test_a_program_that_has_ended_is_told() -> None:
    with pytest.raises(ConsoleError, match="has ended"):
        connect_console(f"monarch-slurm/{os.getuid()}/1-none")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to be somebody else")
def test_another_user_is_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(f"\0{name}")
            stranger.settimeout(20)
            try:
                os.write(write_end, b"got " + stranger.recv(100))
            except ConnectionError:
                os.write(write_end, b"got ")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.read(read_end, 100) == b"got "
    os.close(read_end)
    os.close(write_end)
    wait_until(lambda: "1 from uid 65534" in caplog.text, "the line about strangers")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to be somebody else")
def test_a_name_that_somebody_else_has_taken_is_not_believed() -> None:
    name = f"monarch-slurm/{os.getuid()}/{os.getpid()}-taken"
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as taker:
            taker.bind(f"\0{name}")
            taker.listen()
            os.write(write_end, b"x")
            connection, _ = taker.accept()
            os._exit(len(connection.recv(100)))
    os.read(read_end, 1)
    with pytest.raises(ConsoleError, match="belongs to uid 65534"):
        connect_console(name)
    assert os.waitpid(pid, 0)[1] == 0
    os.close(read_end)
    os.close(write_end)
