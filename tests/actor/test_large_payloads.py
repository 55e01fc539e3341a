"""Large values wherever a value may be, on one host and between two."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from job_agents import Agent
from support import DEADLINE

from monarch_slurm.actor import Actor, ActorError, Channel, HostMesh, Port, endpoint, this_host
from monarch_slurm.controller import gather_hosts, publish

SIZE = 2**20 + 3


def value(number: int) -> dict[str, Any]:
    whole = torch.arange(SIZE, dtype=torch.float32) + number
    views = [whole[:7], whole[7:]]
    return {"views": views, "bytes": bytes([number]) * SIZE, "text": "x" * SIZE, "array": np.arange(SIZE)}


def check(got: dict[str, Any], number: int) -> None:
    sent = value(number)
    head, tail = got["views"]
    assert torch.equal(torch.cat([head, tail]), torch.cat(sent["views"]))
    head.as_strided((SIZE,), (1,)).zero_()
    assert not tail.any(), "they share their memory, which is theirs alone"
    got["array"][0] = 1
    assert (got["bytes"], got["text"]) == (sent["bytes"], sent["text"])


class TooMuchError(Exception):
    """Carries a large value."""


class Echo(Actor):
    def __init__(self, number: int = 0) -> None:
        self.number = number

    @endpoint
    def take(self, number: int, got: Any, *, also: Any = None) -> None:
        check(got, number)
        if also is not None:
            check(also, number)

    @endpoint
    def give(self, number: int) -> Any:
        return value(number)

    @endpoint
    def post(self, port: Port[Any], number: int) -> None:
        for place in range(number):
            port.send(value(place) if place % 2 else place)

    @endpoint
    def fail(self, number: int) -> None:
        raise TooMuchError(value(number))

    @endpoint
    def pass_on(self, other: Any, number: int) -> None:
        for place in range(number):
            other.take.broadcast(place, value(place))
        check(other.give.call_one(number).get(), number)

    @endpoint
    def nothing(self) -> int:
        return os.getpid()


@pytest.fixture(params=["one host", "two other hosts"])
def echoes(
    request: pytest.FixtureRequest, agents: Callable[..., Agent], tmp_path: Path
) -> Iterator[tuple[Any, Any, list[Agent]]]:
    """Two actors, in procs of this host or of a host of its own each, and the agents of those."""
    started: list[Agent] = []
    if request.param == "one host":
        procs = [this_host().spawn_procs() for _ in range(2)]
    else:
        folder = tmp_path / "job"
        publish(folder, address="127.0.0.1")
        # Without the path of its socket agents join by TCP, as those of other machines do.
        file = folder / "controller.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "near": ""}))
        started = [agents(folder, name) for name in ("one", "two")]
        hosts: HostMesh = gather_hosts(["one", "two"], timeout=DEADLINE)
        procs = [hosts.slice(hosts=place).spawn_procs() for place in range(2)]
    one, two = (mesh.spawn("echo", Echo) for mesh in procs)
    yield one, two, started
    for mesh, agent in zip(procs, started or [None, None], strict=True):
        if agent is None or agent.process.poll() is None:
            mesh.stop().get(DEADLINE)


def test_large_values_wherever_a_value_may_be(echoes: tuple[Any, Any, list[Agent]]) -> None:
    one, two, _ = echoes
    one.take.call_one(1, value(1), also=value(1)).get(DEADLINE)
    check(one.give.call_one(2).get(DEADLINE), 2)
    for future in one.give.stream(3):
        check(future.get(DEADLINE), 3)
    port, receiver = Channel.open()
    one.post.broadcast(port, 4)
    for place in range(4):
        got = receiver.recv().get(DEADLINE)
        if place % 2:
            check(got, place)
        else:
            assert got == place
    with pytest.raises(ActorError) as caught:
        one.fail.call_one(5).get(DEADLINE)
    assert isinstance(caught.value.exception, TooMuchError)
    check(caught.value.exception.args[0], 5)
    one.pass_on.call_one(two, 3).get(DEADLINE)


def test_small_calls_are_answered_while_large_values_travel(echoes: tuple[Any, Any, list[Agent]]) -> None:
    one, two, _ = echoes
    futures = [one.take.call_one(number, value(number)) for number in range(4)]
    two.nothing.call_one().get(DEADLINE)
    assert one.nothing.call_one().get(DEADLINE), "it comes behind them, in order"
    for future in futures:
        future.get(DEADLINE)
