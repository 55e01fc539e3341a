from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support import hold, wait_until

from monarch_slurm.wire.tcp_info import TcpConnection, silence_in

READER = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
while connection.recv(65536):
    pass
"""


def info(state: int = 1, probes: int = 0, unacked: int = 0, last_ack_ms: int = 0, not_sent: int = 0) -> bytes:
    """What Linux writes for TCP_INFO, as far as it matters here."""
    raw = bytearray(232)
    raw[0], raw[3] = state, probes
    struct.pack_into("I", raw, 24, unacked)
    struct.pack_into("I", raw, 56, last_ack_ms)
    struct.pack_into("I", raw, 144, not_sent)
    return bytes(raw)


def test_the_last_acknowledgement_counts() -> None:
    assert silence_in(info(unacked=1, last_ack_ms=3500)) == 3.5
    assert silence_in(info(last_ack_ms=900)) == 0.9


def test_a_receiver_without_room_is_silent_only_when_it_has_left_a_question_unanswered() -> None:
    assert silence_in(info(last_ack_ms=60_000, not_sent=1000)) == 0.0
    assert silence_in(info(last_ack_ms=60_000, not_sent=1000, probes=1)) == 60.0


def test_nothing_is_known_of_a_connection_that_has_ended_or_of_a_kernel_that_tells_less() -> None:
    assert silence_in(info(state=8)) is None
    assert silence_in(info()[:100]) is None


@pytest.fixture
def reader() -> Iterator[tuple[socket.socket, int]]:
    """A connection to another process that reads, and its pid."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        child = subprocess.Popen([sys.executable, "-c", READER, str(listener.getsockname()[1])])
        connection, _ = listener.accept()
    yield connection, child.pid
    connection.close()
    child.kill()
    child.wait()


def look(connection: socket.socket) -> TcpConnection:
    found = TcpConnection.of(connection.fileno())
    assert found is not None
    return found


def test_the_machine_of_a_stopped_process_answers(reader: tuple[socket.socket, int]) -> None:
    connection, pid = reader
    known = look(connection)
    hold(pid)

    def answers() -> bool:
        before = known.machine_silence()
        connection.sendall(b"beat")
        after = wait_until(lambda: (known.machine_silence(),))[0]
        return before is not None and after is not None and after < 1.0

    wait_until(answers)


def test_the_machine_of_a_stopped_process_answers_also_when_it_has_no_room(reader: tuple[socket.socket, int]) -> None:
    connection, pid = reader
    known = look(connection)
    hold(pid)
    connection.setblocking(False)

    def is_full() -> bool:
        try:
            connection.send(bytes(1 << 20))
        except BlockingIOError:
            return True
        return False

    wait_until(is_full)
    wait_until(lambda: known.machine_silence() == 0.0, "all that was sent is acknowledged, and the rest waits")


def test_the_kernel_tells_of_the_end_of_a_process(reader: tuple[socket.socket, int]) -> None:
    connection, pid = reader
    known = look(connection)
    assert known.machine_silence() is not None
    os.kill(pid, 9)
    wait_until(lambda: known.machine_silence() is None)


def test_a_later_connection_with_the_same_descriptor_is_another(reader: tuple[socket.socket, int]) -> None:
    connection, _ = reader
    known = look(connection)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as other:
        os.dup2(other.fileno(), connection.fileno())
        assert known.machine_silence() is None


def test_other_descriptors_are_no_tcp_connections() -> None:
    read_end, write_end = os.pipe()
    assert TcpConnection.of(read_end) is None
    assert TcpConnection.of(-1) is None
    os.close(read_end)
    os.close(write_end)
    here, there = socket.socketpair()
    with here, there:
        assert TcpConnection.of(here.fileno()) is None
