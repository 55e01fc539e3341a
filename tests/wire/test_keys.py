from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from monarch_slurm.wire import Invitation, JobKeys, KeyFileError, read_invitation, write_invitation


def make_invitation() -> Invitation:
    keys = JobKeys.make()
    return Invitation("tcp://127.0.0.1:1", keys.server_public, keys.agent_public, keys.agent_secret, "here", 5)


def test_each_job_has_keys_of_its_own() -> None:
    one, other = JobKeys.make(), JobKeys.make()
    parts = [one.server_public, one.server_secret, one.agent_public, one.agent_secret, other.server_secret]
    assert len(set(parts)) == 5


def test_only_the_owner_can_read_the_file_whatever_the_umask(tmp_path: Path) -> None:
    invitation = make_invitation()
    before = os.umask(0)
    try:
        path = write_invitation(tmp_path, invitation)
    finally:
        os.umask(before)
    assert path.name == "controller.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_invitation(path) == invitation
    assert [entry.name for entry in tmp_path.iterdir()] == ["controller.json"]
    assert invitation.agent_secret in path.read_text()
    assert "server_secret" not in json.loads(path.read_text())


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610, 0o606])
def test_a_file_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    path = write_invitation(tmp_path, make_invitation())
    path.chmod(mode)
    with pytest.raises(KeyFileError, match=f"has mode {mode:04o}"):
        read_invitation(path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = write_invitation(tmp_path, make_invitation())
    os.chown(path, 12345, -1)
    with pytest.raises(KeyFileError, match="belongs to uid 12345"):
        read_invitation(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"address": "tcp://1:2"}', '{"unknown": 1}', "null"])
def test_a_file_with_something_else_in_it_is_refused(tmp_path: Path, text: str) -> None:
    path = write_invitation(tmp_path, make_invitation())
    path.write_text(text)
    with pytest.raises(KeyFileError, match="no invitation"):
        read_invitation(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_invitation(tmp_path / "controller.json")


def test_texts_show_no_secret() -> None:
    keys = JobKeys.make()
    invitation = make_invitation()
    assert keys.server_secret not in repr(keys)
    assert keys.agent_secret not in repr(keys)
    assert invitation.agent_secret not in repr(invitation)
