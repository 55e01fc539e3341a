"""What the asking end of ibverbs keeps: keys, queue pairs. On a stand-in; test_verbs.py has a real device."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from monarch_slurm.rdma.engine import Op, Target
from monarch_slurm.rdma.errors import BufferGoneError
from monarch_slurm.rdma.memory import memory_of
from monarch_slurm.rdma.verbs import VerbsEngine, VerbsHost
from monarch_slurm.rdma.verbs_devices import Gid, Port
from rdma.test_gpu_direct import Link, Native


class Owner:
    """Answers an engine; ``keys`` has the key of each slot's buffer."""

    def __init__(self) -> None:
        self.keys: dict[int, int] = {}
        self.asked: list[str] = []

    def ask(self, kind: str, fields: dict[str, Any], _deadline: float) -> dict[str, Any]:
        self.asked.append(kind)
        if kind == "verbs_connect":
            return {"numbers": [1], "gid": b"", "lid": 0, "mtu": 5}
        for slot, key in fields["buffers"]:
            if self.keys.get(slot) != key:
                raise BufferGoneError(f"buffer {slot} not found")
        return {"rkeys": [1000 + key for _, key in fields["buffers"]]}


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def links() -> list[Link]:
    return []


@pytest.fixture
def engine(owner: Owner, links: list[Link], monkeypatch: pytest.MonkeyPatch) -> VerbsEngine:
    gid = Gid(0, None, "RoCE v2")  # type: ignore[arg-type]
    host = VerbsHost(Native(), Port("mlx5_0", 1, gid, 0, 100.0))
    host._device = type("Device", (), {"gid": b"", "lid": 0, "mtu": 5})()

    def make_link(_count: int) -> Link:
        links.append(Link())
        return links[-1]

    monkeypatch.setattr(host, "make_link", make_link)
    return VerbsEngine(host, owner.ask)


def op(slot: int, key: int) -> Op:
    local = memory_of(memoryview(bytearray(8)))
    return Op(False, local.address, 8, Target(slot, key, 0, 123, 8), local)


def soon() -> float:
    return time.monotonic() + 30


def test_keys_are_kept_for_the_last_buffer_of_a_slot(engine: VerbsEngine, owner: Owner, links: list[Link]) -> None:
    for key in range(1, 101):
        owner.keys[key % 5] = key
        for _ in range(2):
            engine.transfer([op(key % 5, key)], soon())
    assert owner.asked.count("verbs_register") == 100
    assert len(engine._rkeys) == 5
    assert [copy[4] for copy in links[0].copies] == [1000 + key for key in range(1, 101) for _ in range(2)]
    with pytest.raises(BufferGoneError):
        engine.transfer([op(0, 95), op(0, 100)], soon())
    assert len(links[0].copies) == 200, "no key of the slot's new buffer opens it for who has the old one"


def test_a_small_batch_has_queue_pairs_of_its_own_beside_a_large_one(
    engine: VerbsEngine, owner: Owner, links: list[Link]
) -> None:
    owner.keys[0] = 1
    engine.transfer([op(0, 1)], soon())
    large, go = threading.Event(), threading.Event()

    def transfer(copies: Any, chunk: int, seconds: float) -> tuple[str, str]:
        large.set()
        assert go.wait(30)
        return "", ""

    links[0].transfer = transfer  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: engine.transfer([op(0, 1)], soon()))
    thread.start()
    assert large.wait(30)
    engine.transfer([op(0, 1)], soon())
    assert [len(link.copies) for link in links] == [1, 1]
    go.set()
    thread.join(30)
    engine.transfer([op(0, 1)], soon())
    assert len(links) == 2
