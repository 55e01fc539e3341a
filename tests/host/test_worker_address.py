from __future__ import annotations

import os

import pytest

from monarch_slurm.host.worker_address import WorkerAddress, WorkerAddressError


@pytest.mark.parametrize(
    ("text", "identity", "dial", "bind"),
    [
        ("tcp://n1:4444", "", "tcp://n1:4444", "tcp://n1:4444"),
        ("tcp://[::1]:4444", "", "tcp://[::1]:4444", "tcp://[::1]:4444"),
        ("tcp://n1:4444@tcp://0.0.0.0:5555", "", "tcp://n1:4444", "tcp://0.0.0.0:5555"),
        ("service<2MuAHe>@tcp://n1:4444", "service<2MuAHe>", "tcp://n1:4444", "tcp://n1:4444"),
        ("a<b>@tcp://n1:4@tcp://0.0.0.0:5", "a<b>", "tcp://n1:4", "tcp://0.0.0.0:5"),
        ("ipc:///tmp/a@b", "", "ipc:///tmp/a@b", "ipc:///tmp/a@b"),
        ("ipc://@abstract", "", "ipc://@abstract", "ipc://@abstract"),
        ("tcp://n1:fd7", "", "tcp://n1:fd7", "tcp://n1:fd7"),
    ],
)
def test_forms_of_addresses(text: str, identity: str, dial: str, bind: str) -> None:
    assert WorkerAddress.parse(text) == WorkerAddress(identity, dial, bind)


def test_a_name_within_this_process() -> None:
    address = WorkerAddress.parse("inproc://1")
    assert address.dial.endswith(f"/{os.getpid()}/1")
    assert address.is_local


@pytest.mark.parametrize(
    "text",
    ["", "n1:4444", "tcp://", "tcp://n1", "tcp://n1:", "tcp://n1:x", "tcp://n1:70000", "tcp://a b:1", "ipc://",
     "ftp://n1:1", "tcp://a:1@tcp://b:2@tcp://c:3", "tcp://n1:1@", "x@n1:1"],
)  # fmt: skip
def test_texts_that_are_no_address(text: str) -> None:
    with pytest.raises(WorkerAddressError, match="worker address"):
        WorkerAddress.parse(text)


@pytest.mark.parametrize("text", ["tcp://*:4444", "metatls://n1:4444", "tls://n1:4444"])
def test_addresses_of_monarch_that_are_not_had_here(text: str) -> None:
    with pytest.raises(NotImplementedError, match="worker address"):
        WorkerAddress.parse(text)


def test_what_is_of_this_machine_alone() -> None:
    for text in ("ipc:///tmp/a", "tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://127.0.0.1:1@tcp://127.0.0.1:2"):
        assert WorkerAddress.parse(text).is_local, text
    for text in ("tcp://10.0.0.1:1", "tcp://127.0.0.1:1@tcp://0.0.0.0:1", "tcp://0.0.0.0:1", "tcp://no.such.host.:1"):
        assert not WorkerAddress.parse(text).is_local, text
