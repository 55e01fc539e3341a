"""A stranger who knows every address and port of a communicator's processes gets no part in it."""

from __future__ import annotations

import os
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from gloo_stranger import HEADS, as_stranger, join_behind_a_stranger, listening
from support import DEADLINE

torch = pytest.importorskip("torch")

from torch.distributed import TCPStore  # noqa: E402

from monarch_slurm.actor import Actor, endpoint, this_host  # noqa: E402
from monarch_slurm.collectives import CollectiveError, Communicator, Invitation, invite  # noqa: E402
from monarch_slurm.collectives.errors import ProofError  # noqa: E402

ANSWER_S = 1.0
"""How long a stranger waits for an answer; the TCPStore beside it answers in less."""


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
    communicators: dict[int, Communicator] = {}

    def join(rank: int) -> None:
        communicators[rank] = Communicator.join(invitation, rank, 2, timeout_s=4)

    errors, got = join_behind_a_stranger(join)
    if got == 0 and errors == [None, None]:
        tensors = [torch.ones(1), torch.ones(1)]
        works = [communicators[rank].all_reduce(tensor) for rank, tensor in enumerate(tensors)]
        for work in works:
            work.wait(DEADLINE)
        assert [tensor.item() for tensor in tensors] == [2.0, 2.0]
        for each in communicators.values():
            each.abort("the test is through")
    else:
        assert got < HEADS
        for error in errors:
            assert isinstance(error, CollectiveError), error
            assert "could not reach all peers" in str(error) or isinstance(error, ProofError)
    assert keys is not None
    keys.close()
    return got > 0


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
