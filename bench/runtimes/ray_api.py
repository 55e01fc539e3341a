"""The figures of Ray: ``ray_api.py GROUPS - SCALE``. What Ray has no like of is left out."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import ray
from samples import OUTSTANDING, PROCS, array, copying, proportional_set_size, report, timed, touch

SCALE = float(sys.argv[3])


class Echo:
    """Answers."""

    def __init__(self) -> None:
        self.array: Any = None

    def echo(self, value: object) -> object:
        return value

    def use_torch(self) -> int:
        import torch

        assert torch.ones(2).sum().item() == 2
        return os.getpid()

    def take(self, values: Any) -> float:
        return touch(values)

    def give(self) -> Any:
        if self.array is None:
            self.array = array()
        return self.array


class AsyncEcho:
    """Answers, and asks others, on an event loop."""

    async def echo(self, value: object) -> object:
        return value

    async def ask(self, other: Any, rounds: int) -> list[float]:
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            await other.echo.remote(None)
            times.append(time.perf_counter() - start)
        return times


# No CPUs are asked for: there may be fewer than actors.
EchoActor: Any = ray.remote(num_cpus=0)(Echo)
AsyncEchoActor: Any = ray.remote(num_cpus=0)(AsyncEcho)


def latency(rounds: int) -> dict[str, list[float]]:
    """Round trips, from the main thread and from actor to actor."""
    echo, asking, answering = EchoActor.remote(), AsyncEchoActor.remote(), AsyncEchoActor.remote()
    result = {"call_one": timed(lambda: ray.get(echo.echo.remote(None)), rounds, 300)}
    ray.get(asking.ask.remote(answering, 300))
    result["actor_to_actor"] = ray.get(asking.ask.remote(answering, rounds))
    for actor in (echo, asking, answering):
        ray.kill(actor)
    return result


def outstanding(rounds: int) -> dict[str, list[float]]:
    """Many calls before the first answer is asked for."""
    echo = EchoActor.remote()
    result = {"outstanding": timed(lambda: ray.get([echo.echo.remote(None) for _ in range(OUTSTANDING)]), rounds, 2)}
    ray.kill(echo)
    return result


def mesh_call(rounds: int) -> dict[str, list[float]]:
    """One call of eight actors."""
    actors = [EchoActor.remote() for _ in range(PROCS)]
    result = {"call_8": timed(lambda: ray.get([actor.echo.remote(None) for actor in actors]), rounds, 50)}
    for actor in actors:
        ray.kill(actor)
    return result


def large(rounds: int) -> dict[str, list[float]]:
    """64 MiB there, and back (mapped read-only)."""
    result = copying(rounds)
    echo = EchoActor.remote()
    values = array()
    result["argument"] = timed(lambda: ray.get(echo.take.remote(values)), rounds, 2)
    result["result"] = timed(lambda: touch(ray.get(echo.give.remote())), rounds, 2)
    ray.kill(echo)
    return result


def life_cycle(rounds: int) -> dict[str, list[float]]:
    """Eight actors that use torch, from their spawn to their end."""
    ray.get(EchoActor.remote().use_torch.remote())
    spawns, stops, memory = [], [], []
    for _ in range(rounds):
        start = time.perf_counter()
        actors = [EchoActor.remote() for _ in range(PROCS)]
        pids = ray.get([actor.use_torch.remote() for actor in actors])
        spawns.append(time.perf_counter() - start)
        memory += [proportional_set_size(pid) for pid in pids]
        start = time.perf_counter()
        for actor in actors:
            ray.kill(actor)
        for pid in pids:
            while os.path.exists(f"/proc/{pid}"):
                time.sleep(0.001)
        stops.append(time.perf_counter() - start)
    return {"spawn_8": spawns, "stop_8": stops, "memory": memory}


def deaths(rounds: int) -> dict[str, list[float]]:
    """kill -9 of an actor's process to the error of a waiting call, and to the answer of the actor started anew."""
    told, respawned = [], []
    actor = EchoActor.options(max_restarts=-1).remote()
    for _ in range(rounds):
        pid = ray.get(actor.use_torch.remote())
        start = time.time()
        waiting = actor.give.remote()
        os.kill(pid, signal.SIGKILL)
        try:
            ray.get(waiting)
        except ray.exceptions.RayActorError:
            told.append(time.time() - start)
        while True:
            try:
                ray.get(actor.use_torch.remote())
                break
            except ray.exceptions.RayActorError:
                continue
        respawned.append(time.time() - start)
    ray.kill(actor)
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
    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=os.cpu_count())
    plan = {"latency": 1000, "outstanding": 3, "mesh_call": 100, "large": 8, "life_cycle": 1, "deaths": 3}
    report(GROUPS, {name: max(1, round(count * SCALE)) for name, count in plan.items()})


if __name__ == "__main__":
    main()
