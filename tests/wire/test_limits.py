from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest
import zmq
from support import REPOSITORY

from monarch_slurm.wire.limits import (
    RESERVE,
    LimitError,
    descriptor_limit,
    descriptors_in_use,
    descriptors_left,
    make_context,
)
from monarch_slurm.wire.sockets import make_dealer


@pytest.fixture
def low_limit() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 24, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_many_sockets_of_a_context_name_its_limit() -> None:
    context = make_context(sockets=3)
    with pytest.raises(LimitError, match=r"3 ZeroMQ sockets are open.*zmq.MAX_SOCKETS.*raise it"):
        _ = [make_dealer(context, f"d{number}") for number in range(4)]
    context.destroy(linger=0)


def test_more_sockets_than_a_context_can_have() -> None:
    with pytest.raises(LimitError, match="10000000 ZeroMQ sockets are asked for"):
        make_context(sockets=10_000_000)


def test_no_descriptors_left_names_ulimit(low_limit: None) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = make_context()
    with pytest.raises(LimitError, match=r"file descriptors are in use.*ulimit -n"):
        _ = [make_dealer(context, f"d{number}") for number in range(1000)]
    context.destroy(linger=0)


def test_what_is_left() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert descriptors_left() == soft - descriptors_in_use() - RESERVE
    text = descriptor_limit("each host takes one")
    assert text.startswith(f"{descriptors_in_use()} of {soft} file descriptors are in use; each host takes one. ")
    assert f"hard limit {hard}" in text


WITHOUT_DESCRIPTORS = """
import os, resource, socket
from monarch_slurm.wire import WireError
from monarch_slurm.wire.bulk import BULK_BYTES, Bulk
from monarch_slurm.wire.stream import Stream

one, other = socket.socketpair()
sender, receiver = Stream(one), Stream(other)
bulk = Bulk.of(bytes(BULK_BYTES))
with sender.lock:
    sender.write([bulk])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
try:
    while True:
        os.open("/dev/null", os.O_RDONLY)
except OSError:
    pass
try:
    receiver.read()
except WireError as error:
    print(error)
"""


def test_a_receiver_of_large_buffers_without_descriptors_says_what_to_raise() -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    text = subprocess.check_output([sys.executable, "-c", WITHOUT_DESCRIPTORS], env=environment, text=True)
    assert text.startswith("a large buffer could not be taken: 64 of 64 file descriptors are in use; each takes one")
    assert "ulimit -n 128 (hard limit 128;" in text
