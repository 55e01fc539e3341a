"""Messages from one sender to one receiver are handled in the order sent, however they were sent."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from sample_actors import AsyncLog, Caller, Log
from support import DEADLINE

from monarch_slurm.actor import ProcMesh, send


@pytest.mark.parametrize("kind", [Log, AsyncLog])
def test_all_adverbs_and_overlapping_slices_keep_one_order(grid: ProcMesh, kind: type[Any]) -> None:
    logs: Any = grid.spawn("log", kind)
    parts = [logs, logs.slice(x=0), logs.slice(y=1), logs.slice(x=1, y=1), logs.slice(x=slice(0, 2), y=0)]
    ranks = [set(part._shape.ranks()) for part in parts]
    expected: dict[int, list[int]] = {rank: [] for rank in range(4)}
    generator = random.Random(5)
    pending = []
    for number in range(3000):
        index = generator.randrange(len(parts))
        part = parts[index]
        for rank in ranks[index]:
            expected[rank].append(number)
        adverb = generator.randrange(4)
        if adverb == 0:
            part.add.broadcast(number)
        elif adverb == 1:
            pending.append(part.add.call(number))
        elif adverb == 2:
            pending += part.add.stream(number)
        else:
            send(part.add, (number,), {})
    for future in pending:
        future.get(DEADLINE)
    seen = logs.get.call().get(DEADLINE)
    assert {rank: seen.get(rank) for rank in range(4)} == expected
    logs.stop().get(DEADLINE)


def test_several_senders_at_once_each_keep_their_order(grid: ProcMesh) -> None:
    logs: Any = grid.spawn("log", Log)
    callers: Any = grid.spawn("caller", Caller)
    count = 1000
    remote = [
        callers.slice(x=x, y=y).add_many.call_one(logs, f"actor {x} {y}", count) for x in range(2) for y in range(2)
    ]

    def send_from_here(name: str) -> None:
        for number in range(count):
            logs.add.broadcast((name, number))
        logs.add.call((name, count)).get(DEADLINE)

    threads = [threading.Thread(target=send_from_here, args=(f"thread {i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE)
        assert not thread.is_alive()
    for future in remote:
        future.get(2 * DEADLINE)
    names = [f"actor {x} {y}" for x in range(2) for y in range(2)] + [f"thread {i}" for i in range(3)]
    for seen in logs.get.call().get(DEADLINE).values():
        for name in names:
            assert [number for sender, number in seen if sender == name] == list(range(count + 1))
    logs.stop().get(DEADLINE)
    callers.stop().get(DEADLINE)


def test_init_comes_before_the_first_message(grid: ProcMesh) -> None:
    for number in range(20):
        logs: Any = grid.spawn("log", Log, number)
        logs.add.broadcast("later")
        assert all(seen == [number, "later"] for seen in logs.get.call().get(DEADLINE).values())
        logs.stop().get(DEADLINE)


def test_ports_keep_the_order_of_a_sender(grid: ProcMesh) -> None:
    from monarch_slurm.actor import Channel

    callers: Any = grid.spawn("caller", Caller)
    port, receiver = Channel.open()
    items = [(rank, number) for rank in range(4) for number in range(500)]
    for rank, (x, y) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        callers.slice(x=x, y=y).send_to.broadcast(port, items[rank * 500 : (rank + 1) * 500])
    seen = [receiver.recv().get(DEADLINE) for _ in items]
    assert sorted(seen) == items
    for rank in range(4):
        assert [number for sender, number in seen if sender == rank] == list(range(500))
    callers.stop().get(DEADLINE)
