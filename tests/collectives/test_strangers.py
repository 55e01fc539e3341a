"""A stranger who knows every address and port of a communicator's processes gets no part in it."""

from __future__ import annotations

import encodings.idna  # noqa: F401 - a stranger may not be able to read Python's own files
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import DEADLINE, wait_until

torch = pytest.importorskip("torch")

from torch.distributed import TCPStore  # noqa: E402

from monarch_slurm.actor import Actor, endpoint, this_host  # noqa: E402
from monarch_slurm.collectives import CollectiveError, Communicator, Invitation, invite  # noqa: E402

NOBODY = 65534
ANSWER_S = 1.0
"""How long a stranger waits for an answer; the TCPStore beside it answers in less."""


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


def is_tcp_store(port: int) -> bool:
    """Whether what listens there answers a ping as a TCPStore does: to anybody."""
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) as connection:
        connection.sendall(struct.pack("<BI", 0, 0x3C85F7CE) + struct.pack("<BI", 13, 4711))
        try:
            return connection.recv(4) == struct.pack("<I", 4711)
        except (TimeoutError, ConnectionResetError):
            return False


class Worker(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def total(self, group: Any) -> float:
        value = torch.ones(1)
        group.local().all_reduce(value).wait(DEADLINE)
        return float(value)


def test_no_process_of_a_communicator_serves_a_store() -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    group = Communicator.create(procs, backend="gloo")
    workers = procs.spawn("workers", Worker)
    assert [total for _, total in workers.total.call(group).get(DEADLINE).items()] == [2.0, 2.0]
    pids = [pid for _, pid in workers.pid.call().get(DEADLINE).items()]
    ports = sorted(set.union(*(listening(pid) for pid in pids)))
    assert len(ports) == 2, "gloo's own port in each, and nothing else"
    theirs = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert as_stranger(lambda: str([is_tcp_store(port) for port in [*ports, theirs.port]])) == "[False, False, True]"
    assert [total for _, total in workers.total.call(group).get(DEADLINE).items()] == [2.0, 2.0]
    group.close()
    procs.stop().get(DEADLINE)


def test_a_stranger_in_the_place_of_a_late_rank_gets_nothing_and_is_noticed() -> None:
    # Whether rank 0 is the one that is connected to depends on the ports, which are ephemeral.
    for _ in range(30):
        if take_the_place_of_rank_1():
            return
    pytest.fail("the stranger never got the place")


def take_the_place_of_rank_1() -> bool:
    """Have a stranger connect to rank 0 before rank 1 does; return whether it was taken for rank 1."""
    invitation, keys = invite("gloo")
    before = listening()
    done, finish = os.pipe()
    reading, writing = os.pipe()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(Communicator.join, invitation, 0, 2, timeout_s=4)
        (port,) = wait_until(lambda: listening() - before, "gloo's port of rank 0")

        def connect_first() -> str:
            # The number of a rank's connection is all that gloo asks for. Whatever it is, this has it.
            connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
            for number, connection in enumerate(connections):
                connection.sendall(struct.pack("<Q", number))
            os.write(writing, b"+")
            os.read(done, 1)
            for connection in connections:
                connection.setblocking(False)
            return str(sum(map(read_all, connections)))

        stranger = pool.submit(as_stranger, connect_first)
        assert select.select([reading], [], [], DEADLINE)[0], stranger.result(DEADLINE)
        second = pool.submit(Communicator.join, invitation, 1, 2, timeout_s=4)
        errors = [rank.exception(DEADLINE) for rank in (first, second)]
        os.write(finish, b"+")
        got = int(stranger.result(DEADLINE))
    for fd in (done, finish, reading, writing):
        os.close(fd)
    if got == 0 and errors == [None, None]:
        communicators = [first.result(), second.result()]
        tensors = [torch.ones(1), torch.ones(1)]
        works = [each.all_reduce(tensor) for each, tensor in zip(communicators, tensors, strict=True)]
        for work in works:
            work.wait(DEADLINE)
        assert [tensor.item() for tensor in tensors] == [2.0, 2.0]
        for each in communicators:
            each.abort("the test is through")
    else:
        assert got < 200, "no more than the heads of gloo's messages"
        for error in errors:
            assert isinstance(error, CollectiveError), error
            assert "could not reach all peers" in str(error) or "did not prove" in str(error)
    assert keys is not None
    keys.close()
    return got > 0


def read_all(connection: socket.socket) -> int:
    """How many bytes have come."""
    try:
        return len(connection.recv(1 << 20))
    except (BlockingIOError, ConnectionResetError):
        return 0


def test_ranks_with_another_secret_do_not_meet() -> None:
    invitation, _ = invite("gloo")
    other = Invitation("gloo", os.urandom(32), invitation.name, invitation.address, invitation.store)
    with ThreadPoolExecutor(2) as pool:
        ranks = [
            pool.submit(Communicator.join, given, rank, 2, timeout_s=DEADLINE)
            for rank, given in enumerate([invitation, other])
        ]
        for rank, joining in enumerate(ranks):
            with pytest.raises(CollectiveError, match=rf"rank {1 - rank} of 2 did not prove to rank {rank}"):
                joining.result(DEADLINE)


def test_an_address_and_a_port_are_no_invitation() -> None:
    began = time.monotonic()
    with pytest.raises(CollectiveError, match="names no store"):
        Communicator.join(Invitation("gloo", b"127.0.0.1:29500"), 1, 2)
    assert time.monotonic() - began < DEADLINE
