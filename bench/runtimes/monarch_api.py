"""The figures of a runtime with Monarch's API, this one or torchmonarch: ``monarch_api.py GROUPS MODULE SCALE``."""

from __future__ import annotations

import importlib
import os
import random
import signal
import sys
import time
from typing import Any

from samples import OUTSTANDING, PROCS, array, copying, proportional_set_size, report, timed, touch

monarch: Any = importlib.import_module(sys.argv[2])
SCALE = float(sys.argv[3])
WAIT = 120.0


class Echo(monarch.Actor):  # type: ignore[misc]
    """Answers."""

    def __init__(self) -> None:
        self.array: Any = None

    @monarch.endpoint
    def echo(self, value: object) -> object:
        return value

    @monarch.endpoint
    def pid(self) -> int:
        return os.getpid()

    @monarch.endpoint
    def use_torch(self) -> int:
        import torch

        assert torch.ones(2).sum().item() == 2
        return os.getpid()

    @monarch.endpoint
    def take(self, values: Any) -> float:
        return touch(values)

    @monarch.endpoint
    def give(self) -> Any:
        if self.array is None:
            self.array = array()
        return self.array


class AsyncEcho(monarch.Actor):  # type: ignore[misc]
    """Answers, and asks others, on an event loop."""

    @monarch.endpoint
    async def echo(self, value: object) -> object:
        return value

    @monarch.endpoint
    async def ask(self, other: Any, rounds: int) -> list[float]:
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            await other.echo.call_one(None)
            times.append(time.perf_counter() - start)
        return times


class Owner(monarch.Actor):  # type: ignore[misc]
    """Owns a proc and is told of its death."""

    def __init__(self) -> None:
        self.told_at = 0.0
        self.procs: Any = None

    @monarch.endpoint
    async def start(self) -> int:
        self.told_at = 0.0
        self.procs = monarch.this_host().spawn_procs(per_host={"n": 1})
        return int(await self.procs.spawn("echo", Echo).use_torch.call_one())

    @monarch.endpoint
    async def told(self) -> float:
        return self.told_at

    async def __supervise__(self, failure: object) -> bool:
        self.told_at = time.time()
        return True


def spawn(count: int = PROCS) -> Any:
    return monarch.this_host().spawn_procs(per_host={"n": count})


def one_proc(kind: type, name: str) -> tuple[Any, Any]:
    procs = spawn(1)
    return procs, procs.spawn(name, kind)


def latency(rounds: int) -> dict[str, list[float]]:
    """Round trips, from the main thread and from actor to actor."""
    procs, echo = one_proc(Echo, "echo")
    others, answering = one_proc(AsyncEcho, "answering")
    asking = procs.spawn("asking", AsyncEcho)
    result = {"call_one": timed(lambda: echo.echo.call_one(None).get(), rounds, 300)}
    asking.ask.call_one(answering, 300).get()
    result["actor_to_actor"] = asking.ask.call_one(answering, rounds).get()
    for mesh in (procs, others):
        mesh.stop().get()
    return result


def outstanding(rounds: int) -> dict[str, list[float]]:
    """Many calls before the first answer is asked for."""
    procs, echo = one_proc(Echo, "echo")

    def burst() -> None:
        for future in [echo.echo.call_one(None) for _ in range(OUTSTANDING)]:
            future.get()

    result = {"outstanding": timed(burst, rounds, 2)}
    procs.stop().get()
    return result


def mesh_call(rounds: int) -> dict[str, list[float]]:
    """One call of eight actors."""
    procs = spawn()
    echo = procs.spawn("echo", Echo)
    result = {"call_8": timed(lambda: echo.echo.call(None).get(), rounds, 100)}
    procs.stop().get()
    return result


def large(rounds: int) -> dict[str, list[float]]:
    """64 MiB there, and back."""
    result = copying(rounds)
    procs, echo = one_proc(Echo, "echo")
    values = array()
    expected = touch(values)
    result["argument"] = timed(lambda: echo.take.call_one(values).get(), rounds, 2)
    assert echo.take.call_one(values).get() == expected
    result["result"] = timed(lambda: touch(echo.give.call_one().get()), rounds, 2)
    assert touch(echo.give.call_one().get()) == expected
    procs.stop().get()
    return result


def life_cycle(rounds: int) -> dict[str, list[float]]:
    """Eight procs that use torch, from their spawn to their end."""
    warm = spawn(1)
    warm.spawn("echo", Echo).use_torch.call().get()
    spawns, stops, memory = [], [], []
    for _ in range(rounds):
        start = time.perf_counter()
        procs = spawn()
        pids = [pid for _, pid in procs.spawn("echo", Echo).use_torch.call().get().items()]
        spawns.append(time.perf_counter() - start)
        memory += [proportional_set_size(pid) for pid in pids]
        stops += timed(lambda procs=procs: procs.stop().get(), 1)  # type: ignore[misc]
    warm.stop().get()
    return {"spawn_8": spawns, "stop_8": stops, "memory": memory}


def deaths(rounds: int) -> dict[str, list[float]]:
    """kill -9 of a proc to what its owner sees, and to the answer of another in its place; at random moments."""
    procs, owner = one_proc(Owner, "owner")
    told, respawned = [], []
    for _ in range(rounds):
        pid = owner.start.call_one().get()
        time.sleep(random.uniform(0.0, min(1.0, 10 * SCALE)))
        start = time.time()
        os.kill(pid, signal.SIGKILL)
        while not (at := owner.told.call_one().get()):
            time.sleep(0.001)
        told.append(at - start)
        begin = time.time()
        owner.start.call_one().get()
        respawned.append(at - start + time.time() - begin)
    procs.stop().get()
    return {"told": told, "respawned": respawned}


GROUPS = {
    "latency": latency,
    "outstanding": outstanding,
    "mesh_call": mesh_call,
    "large": large,
    "life_cycle": life_cycle,
    "deaths": deaths,
}


def main() -> None:
    """Measure what the arguments name."""
    if sys.argv[2].startswith("monarch_slurm"):
        from monarch_slurm.config import configure

        configure(preload="torch")
    plan = {"latency": 1000, "outstanding": 5, "mesh_call": 300, "large": 8, "life_cycle": 3, "deaths": 5}
    report(GROUPS, {name: max(2, round(count * SCALE)) for name, count in plan.items()})


if __name__ == "__main__":
    main()
