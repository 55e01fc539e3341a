from __future__ import annotations

import dataclasses
import os
import socket

import pytest

from monarch_slurm.host.dial import check_not_own, connection_trouble
from monarch_slurm.host.identity import NoControllerError
from monarch_slurm.wire import Invitation

ELSEWHERE = Invitation("", "", "", "", controller_host="another machine")


def of(port: int, ip: str = "127.0.0.1") -> Invitation:
    return dataclasses.replace(ELSEWHERE, address=f"tcp://{ip}:{port}")


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_an_address_of_this_machine_where_nobody_listens_is_named(free_port: int) -> None:
    match = rf"host n2 .* at 127.0.0.1 port {free_port}: Connection refused. .* itself \(lo\), and the controller runs"
    with pytest.raises(NoControllerError, match=match):
        check_not_own(of(free_port), "n2")


def test_an_address_of_this_machine_may_be_the_controllers_in_another_pid_namespace() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_not_own(of(server.getsockname()[1]), "n2")


def test_the_address_of_another_machine_is_not_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch_slurm.host.dial._refusal", lambda ip, port: pytest.fail("dialled"))
    check_not_own(of(9, "203.0.113.9"), "n2")


def test_a_connection_is_seen_and_its_lack_explained(free_port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", here)):
            assert connection_trouble(of(here), os.getpid()) is None
        server.accept()[0].close()
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()  # it was looked for, and not dialled
    said = f"cannot dial the controller at 127.0.0.1 port {free_port}: Connection refused"
    assert connection_trouble(of(free_port), os.getpid()) == said
