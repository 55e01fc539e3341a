"""A process of another user that connects to gloo's port before the rank does for whom gloo waits there."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - a stranger may not be able to read Python's own files
import os
import select
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support import DEADLINE, wait_until

NOBODY = 65534
HEADS = 200
"""Bytes: more than the heads of gloo's messages and the proof that a stranger may get."""


def listening(pid: int | str = "self") -> set[int]:
    """TCP ports at which a process listens, on whatever address."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(entry))
        except FileNotFoundError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
        found |= {
            int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes
        }
    return found


def as_stranger(body: Callable[[], str]) -> str:
    """Run ``body`` in a process of another user, who has nothing of this program's; return what it returns."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            os.write(tell, body().encode())
        except BaseException as error:
            os.write(tell, repr(error).encode())
        finally:
            os._exit(0)
    os.close(tell)
    with open(told) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return text


def join_behind_a_stranger(join: Callable[[int], None]) -> tuple[list[BaseException | None], int]:
    """Have two ranks join a group in threads of this process, and a stranger come to rank 0 before rank 1 does.

    Args:
        join: makes the group for a rank.

    Returns:
        What each rank raised, and how many bytes the stranger got.
    """
    before = listening()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(join, 0)
        (port,) = wait_until(lambda: listening() - before, "gloo's port of rank 0")
        with _stranger(pool, port) as bytes_of_stranger:
            second = pool.submit(join, 1)
            errors = [rank.exception(DEADLINE) for rank in (first, second)]
            return errors, bytes_of_stranger()


@contextlib.contextmanager
def _stranger(pool: ThreadPoolExecutor, port: int) -> Iterator[Callable[[], int]]:
    """Have a stranger connect; yields what ends it and returns how many bytes it got."""
    done, finish = os.pipe()
    reading, writing = os.pipe()

    def connect_first() -> str:
        # The number of a rank's connection is all that gloo asks for. Whatever it is, this has it.
        connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(16)]
        for number, connection in enumerate(connections):
            connection.sendall(struct.pack("<Q", number))
        os.write(writing, b"+")
        os.read(done, 1)
        for connection in connections:
            connection.setblocking(False)
        return str(sum(map(_read_all, connections)))

    stranger = pool.submit(as_stranger, connect_first)

    def end() -> int:
        os.write(finish, b"+")
        return int(stranger.result(DEADLINE))

    try:
        assert select.select([reading], [], [], DEADLINE)[0], stranger.result(DEADLINE)
        yield end
    finally:
        os.write(finish, b"+")
        stranger.result(DEADLINE)
        for fd in (done, finish, reading, writing):
            os.close(fd)


def _read_all(connection: socket.socket) -> int:
    """How many bytes have come."""
    try:
        return len(connection.recv(1 << 20))
    except (BlockingIOError, ConnectionResetError):
        return 0
