from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_slurm.wire import KeyFileError
from monarch_slurm.wire.shared_key import (
    ALLOW_VARIABLE,
    KEY_VARIABLE,
    TRUST_ALL,
    NoKeyError,
    choose_secret,
    derive_keys,
    make_key_file,
)

SECRET = bytes(range(32))


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.delenv(ALLOW_VARIABLE, raising=False)


def test_a_key_is_bytes_or_a_private_file(tmp_path: Path) -> None:
    path = make_key_file(tmp_path / "key")
    assert path.stat().st_mode & 0o777 == 0o600
    secret, known = choose_secret(path, None)
    assert len(secret) >= 32
    assert not known
    assert choose_secret(str(path), None) == choose_secret(None, path) == choose_secret(path, path) == (secret, False)
    assert choose_secret(SECRET, None) == (SECRET, False)
    with pytest.raises(FileExistsError):
        make_key_file(path)


def test_files_that_others_can_reach_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_key_file(tmp_path / "key")
    for mode in (0o640, 0o604, 0o620, 0o777):
        path.chmod(mode)
        with pytest.raises(KeyFileError, match=f"has mode {mode:04o}"):
            choose_secret(path, None)
    path.chmod(0o600)
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    if path.stat().st_uid != 0:
        with pytest.raises(KeyFileError, match="belongs to uid"):
            choose_secret(path, None)
    with pytest.raises(KeyFileError, match=r"cannot read the key file .*No such file"):
        choose_secret(tmp_path / "none", None)


def test_keys_that_are_too_short_or_differ(tmp_path: Path) -> None:
    (tmp_path / "short").touch(mode=0o600)
    with pytest.raises(ValueError, match="has 0 bytes; 32 random ones"):
        choose_secret(tmp_path / "short", None)
    with pytest.raises(ValueError, match="the key has 31 bytes") as error:
        choose_secret(SECRET[:31], None)
    assert SECRET[:31].decode() not in str(error.value)
    with pytest.raises(ValueError, match="give it once"):
        choose_secret(SECRET, SECRET + b"more")


def test_trust_all_connections_needs_permission_and_never_goes_before_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ca in (TRUST_ALL, None):
        with pytest.raises(NoKeyError, match="make_worker_key"):
            choose_secret(None, ca)
    monkeypatch.setenv(ALLOW_VARIABLE, "0")
    with pytest.raises(NoKeyError):
        choose_secret(None, TRUST_ALL)
    monkeypatch.setenv(ALLOW_VARIABLE, "1")
    assert choose_secret(None, TRUST_ALL)[1]
    with pytest.raises(NoKeyError):
        choose_secret(None, None)
    assert choose_secret(SECRET, TRUST_ALL) == (SECRET, False)
    monkeypatch.setenv(KEY_VARIABLE, str(make_key_file(tmp_path / "key")))
    assert choose_secret(None, TRUST_ALL) == choose_secret(tmp_path / "key", None)
    assert choose_secret(SECRET, None) == (SECRET, False)


@given(st.binary(min_size=32, max_size=200), st.binary(min_size=32, max_size=200))
def test_both_ends_derive_the_same_keys_and_others_other_ones(one: bytes, other: bytes) -> None:
    keys = derive_keys(one)
    assert keys == derive_keys(one)
    parts = {keys.server_public, keys.server_secret, keys.agent_public, keys.agent_secret}
    assert len(parts) == 4
    if one != other:
        assert parts.isdisjoint(vars(derive_keys(other)).values())
