"""Controllers: one actor per name in the whole program."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support import DEADLINE, Program, wait_until

from monarch_slurm.actor import Actor, ActorError, ProcMesh, SupervisionError, endpoint, get_or_spawn_controller


class Counter(Actor):
    def __init__(self, first: int = 0) -> None:
        self.value = first

    @endpoint
    def add(self, n: int) -> tuple[int, int]:
        self.value += n
        return self.value, os.getpid()

    @endpoint
    def fail(self) -> None:
        raise ValueError("on purpose")


class Worker(Actor):
    @endpoint
    async def add(self, name: str) -> tuple[int, int]:
        counter: Any = await get_or_spawn_controller(name, Counter, 100)
        result: tuple[int, int] = await counter.add.call_one(1)
        return result


def counter(name: str, *args: Any) -> Any:
    return get_or_spawn_controller(name, Counter, *args).get(DEADLINE)


def test_every_process_gets_the_same_one(grid: ProcMesh) -> None:
    workers: Any = grid.spawn("worker", Worker)
    answers = workers.add.call("shared").get(DEADLINE).values()
    assert sorted(answers) == [(value, os.getpid()) for value in range(101, 105)]
    assert counter("shared", 7).add.call_one(0).get(DEADLINE) == (104, os.getpid())
    assert counter("other", 7).add.call_one(0).get(DEADLINE) == (7, os.getpid())


def test_many_who_ask_at_once_get_one() -> None:
    with ThreadPoolExecutor(16) as pool:
        names = set(pool.map(lambda _: counter("raced")._name.get(), range(64)))
    assert len(names) == 1


def test_one_that_has_failed(grid: ProcMesh) -> None:
    failing = counter("failing")
    failing.fail.broadcast()
    with pytest.raises(SupervisionError, match="on purpose"):
        failing.add.call_one(1).get(DEADLINE)

    def failure() -> BaseException | None:
        return get_or_spawn_controller("failing", Counter).exception(DEADLINE)

    error = wait_until(failure, "the news of the failure")
    assert type(error) is ValueError
    assert str(error).startswith("Failure on failing: Supervision event: ")
    assert "on purpose" in str(error)
    worker: Any = grid.slice(x=0, y=0).spawn("worker", Worker)
    with pytest.raises(ActorError, match="Failure on failing: ") as caught:
        worker.add.call_one("failing").get(DEADLINE)
    assert counter("sound").add.call_one(1).get(DEADLINE)[0] == 1
    assert isinstance(caught.value.exception, ActorError)


def test_arguments_are_checked_at_the_call() -> None:
    with pytest.raises(TypeError, match="too many positional arguments"):
        get_or_spawn_controller("c", Counter, 1, 2)
    with pytest.raises(ValueError, match="must subclass"):
        get_or_spawn_controller("c", int)  # type: ignore[type-var]


def test_controllers_end_with_the_program(program: Callable[..., Program]) -> None:
    running = program(
        """
        from monarch_slurm.actor import Actor, endpoint, get_or_spawn_controller

        class Registry(Actor):
            @endpoint
            def get(self):
                return 1

        if __name__ == "__main__":
            registry = get_or_spawn_controller("registry", Registry).get(30)
            print(registry.get.call_one().get(30))
        """
    )
    assert running.wait() == 0
    assert running.output() == "1\n"
    assert running.errors() == ""
