from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
import zmq

from monarch_slurm.config import configured
from monarch_slurm.errors import ConfigError
from monarch_slurm.wire.keys import JobKeys
from monarch_slurm.wire.ports import listen_tcp, ports_to_try
from monarch_slurm.wire.sockets import BindError, bind_tcp, make_router

HERE = "127.0.0.1"


@pytest.fixture
def taken() -> Iterator[list[int]]:
    """Two ports next to each other; the first is taken."""
    with contextlib.ExitStack() as stack:
        while True:
            first = stack.enter_context(listen_tcp(HERE, 1))
            port = int(first.getsockname()[1])
            with contextlib.suppress(OSError):
                socket.create_server((HERE, port + 1)).close()
                yield [port, port + 1]
                return


def test_ports_are_the_systems_choice_unless_there_is_a_range() -> None:
    assert ports_to_try() == [0]
    with configured(port_range="40000-40003"):
        assert sorted(ports_to_try()) == [40000, 40001, 40002, 40003]


@pytest.mark.parametrize("text", ["40000", "5-4", "0-9", "1-70000", "a-b"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with configured(port_range=text), pytest.raises(ConfigError, match="the first and the last port expected"):
        ports_to_try()


def test_a_free_port_of_the_range_is_taken(taken: list[int]) -> None:
    with configured(port_range=f"{taken[0]}-{taken[1]}"):
        with listen_tcp(HERE, 1) as listener:
            assert listener.getsockname()[1] == taken[1]
            with pytest.raises(OSError, match=r"is free on 127\.0\.0\.1: give a larger port_range"):
                listen_tcp(HERE, 1)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            router = make_router(context)
            assert bind_tcp(router, HERE, JobKeys.make()) == f"tcp://{HERE}:{taken[1]}"
            with pytest.raises(BindError, match="give a larger port_range"):
                bind_tcp(make_router(context), HERE, JobKeys.make())
        finally:
            context.destroy(linger=0)


def test_an_address_that_is_not_here_is_an_error_at_once() -> None:
    with configured(port_range="40000-49999"), pytest.raises(OSError, match="Cannot assign"):
        listen_tcp("203.0.113.7", 1)
