"""Snapshots, their digests and their way over the wire: equal bit for bit, or told apart."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from monarch_slurm.train import state


def tree() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "model": {"w": torch.randn(3, 4), "half": torch.randn(5).bfloat16(), "none": torch.empty(0, 7)},
        "optimizer": {"state": {0: {"step": torch.tensor(7.0)}}, "groups": [{"betas": (0.9, 0.95), "fused": True}]},
        "where": {"step": 3, "name": "ä", "nothing": None, "nan": float("nan")},
    }


def reader(data: bytes) -> Callable[[memoryview], None]:
    stream = io.BytesIO(data)

    def fill(buffer: memoryview) -> None:
        if stream.readinto(buffer) != len(buffer):
            raise ConnectionError("cut off")

    return fill


def wire(snapshot: Any) -> bytes:
    return state.encode_header(snapshot) + b"".join(map(bytes, map(state.raw_bytes, state.tensors(snapshot))))


def test_a_snapshot_does_not_change_with_the_original() -> None:
    live = tree()
    copy = state.snapshot(live)
    before = state.digest(copy)
    assert state.digest(live) == before
    live["model"]["w"].add_(1)
    assert state.digest(copy) == before
    assert state.digest(live) != before


def test_a_snapshot_travels_whole() -> None:
    copy = state.snapshot(tree())
    came = state.read_snapshot(reader(wire(copy)))
    assert state.digest(came) == state.digest(copy)
    assert came["optimizer"]["groups"][0]["betas"] == (0.9, 0.95)
    assert list(came["optimizer"]["state"]) == [0]
    assert torch.equal(came["model"]["half"], copy["model"]["half"])
    assert state.size(came) == 3 * 4 * 4 + 5 * 2 + 4


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    other = tree()
    place = other
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return other


@pytest.mark.parametrize(
    "other",
    [
        changed(("where", "step"), 4),
        changed(("where", "step"), 3.0),
        changed(("where", "step"), "3"),
        changed(("where", "nothing"), False),
        changed(("optimizer", "state"), {"0": {"step": torch.tensor(7.0)}}),
        changed(("optimizer", "groups", 0, "betas"), [0.9, 0.95]),
        changed(("model", "w"), tree()["model"]["w"].double()),
        changed(("model", "w"), tree()["model"]["w"].reshape(4, 3)),
        changed(("model", "none"), torch.empty(7, 0)),
        changed(("model", "more"), torch.zeros(0)),
    ],
)
def test_any_difference_changes_the_digest(other: Any) -> None:
    assert state.digest(other) != state.digest(tree())


def test_signs_of_zero_and_single_bits_count() -> None:
    assert state.digest(torch.tensor([0.0])) != state.digest(torch.tensor([-0.0]))
    assert state.digest(torch.tensor([1.0])) != state.digest(torch.tensor([1.0]).nextafter(torch.tensor([2.0])))


def test_the_order_of_entries_does_not_count() -> None:
    assert state.digest({"a": 1, "b": 2}) == state.digest({"b": 2, "a": 1})


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(state.StateError, match="function"):
        state.snapshot({"hook": tree})


def test_a_shard_needs_a_mesh() -> None:
    shard = {"__shard__": torch.ones(2), "dims": [0], "shape": [4], "stride": [1]}
    with pytest.raises(state.StateError, match="single rank"):
        state.restore({"w": shard}, {})


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n", (5).to_bytes(8, "big") + b"\xff\xfe\xfd{}"])
def test_junk_is_refused(junk: bytes) -> None:
    with pytest.raises(state.StateError):
        state.read_snapshot(reader(junk))


@pytest.mark.parametrize("header", ['["tensor","load",[1]]', '["tensor","float32",[-1]]', '["set",[1]]', '["dict",5]'])
def test_a_header_that_describes_nothing_is_refused(header: str) -> None:
    with pytest.raises(state.StateError, match="cannot be read"):
        state.read_snapshot(reader(len(header).to_bytes(8, "big") + header.encode()))


def test_a_state_that_is_cut_off_raises() -> None:
    data = wire(state.snapshot(tree()))
    with pytest.raises(ConnectionError):
        state.read_snapshot(reader(data[:-1]))
