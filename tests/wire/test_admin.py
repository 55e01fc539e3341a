"""Questions to a controller: answers, errors, who may ask, and controllers that are gone."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from support import DEADLINE, wait_until

from monarch_slurm.wire import AdminClient, AdminServer, JobKeys, KeyFileError, NoAnswerError, ask, read_invitation
from monarch_slurm.wire.admin import ADMIN_FILE
from monarch_slurm.wire.keys import Invitation
from monarch_slurm.wire.sockets import connect_tcp, make_dealer


def add(first: int, second: int) -> int:
    return first + second


@pytest.fixture
def server(tmp_path: Path) -> Iterator[AdminServer]:
    answers = {"add": add, "path": lambda: {"where": Path("/x")}, "fail": lambda: 1 / 0}
    admin = AdminServer(tmp_path, "127.0.0.1", answers)
    yield admin
    admin.close()


def test_questions_are_answered_in_any_number(server: AdminServer, tmp_path: Path) -> None:
    with AdminClient(tmp_path) as client:
        assert [client.ask("add", first=n, second=n) for n in range(50)] == [2 * n for n in range(50)]
        assert client.ask("path") == {"where": "/x"}


def test_errors_are_told_and_the_next_question_is_answered(server: AdminServer, tmp_path: Path) -> None:
    with AdminClient(tmp_path) as client:
        for question, arguments, words in (
            ("fail", {}, "ZeroDivisionError"),
            ("nonsense", {}, r"unknown question 'nonsense'; known here: add, fail, path"),
            ("add", {"third": 3}, "third"),
        ):
            with pytest.raises(NoAnswerError, match=words):
                client.ask(question, **arguments)
        assert client.ask("add", first=1, second=2) == 3


def test_several_ask_at_once(server: AdminServer, tmp_path: Path) -> None:
    got: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: got.append(ask(tmp_path, "add", DEADLINE, first=n, second=0)))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert sorted(got) == list(range(8))


def test_the_file_is_private_and_vanishes_with_the_server(server: AdminServer, tmp_path: Path) -> None:
    file = tmp_path / ADMIN_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    server.close()
    server.close()
    assert not file.exists()
    with pytest.raises(NoAnswerError, match="no controller is running"):
        ask(tmp_path, "add")


def test_a_file_that_others_can_read_is_refused(server: AdminServer, tmp_path: Path) -> None:
    (tmp_path / ADMIN_FILE).chmod(0o640)
    with pytest.raises(KeyFileError, match="0640"):
        ask(tmp_path, "add")


def test_a_stranger_gets_no_answer_and_the_server_goes_on(server: AdminServer, tmp_path: Path) -> None:
    invitation = read_invitation(tmp_path / ADMIN_FILE)
    strange = JobKeys.make()
    context: zmq.Context[Any] = zmq.Context()
    try:
        for keys in ((strange.agent_public, strange.agent_secret), None):
            socket = make_dealer(context, "stranger")
            if keys is None:
                socket.connect(invitation.address)  # no CURVE at all
            else:
                connect_tcp(socket, Invitation(invitation.address, invitation.server_public, *keys))
            socket.send(json.dumps([1, "add", {"first": 1, "second": 1}]).encode())
        wait_until(lambda: server._gatekeeper.refused >= 2)
        assert ask(tmp_path, "add", DEADLINE, first=2, second=2) == 4
        assert not socket.poll(0)
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"[1]", b'["x", "add", {}]', b'[1, "add", 3]', b"\xff"])
def test_garbage_is_dropped(server: AdminServer, tmp_path: Path, text: bytes) -> None:
    with AdminClient(tmp_path) as client:
        client._socket.send(text)
        assert client.ask("add", DEADLINE, first=1, second=1) == 2


def test_a_controller_that_was_killed_is_told_with_its_address(tmp_path: Path) -> None:
    admin = AdminServer(tmp_path, "127.0.0.1", {"add": add})
    text = (tmp_path / ADMIN_FILE).read_text()
    admin.close()
    (tmp_path / ADMIN_FILE).write_text(text)
    os.chmod(tmp_path / ADMIN_FILE, 0o600)
    address = json.loads(text)["address"].removeprefix("tcp://")
    with pytest.raises(NoAnswerError, match=rf"controller at {address} did not answer within 0.3 s"):
        ask(tmp_path, "add", 0.3, first=1, second=1)
