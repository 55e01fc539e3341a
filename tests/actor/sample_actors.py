"""Actors that the tests call. Procs import this module, so it needs nothing but the package."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from monarch_slurm.actor import (
    Accumulator,
    Actor,
    MeshFailure,
    Port,
    ProcMesh,
    concurrent_endpoint,
    context,
    current_actor_name,
    current_rank,
    current_size,
    endpoint,
    this_host,
    this_proc,
)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled on purpose")


class UnpicklableError(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled on purpose")


class BadlyUnpickled(Exception):
    """Pickles, but does not unpickle: __init__ wants what args lacks."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first)


def explode() -> None:
    raise RuntimeError("this value explodes when it is unpickled")


class SpecialExit(BaseException):
    pass


class Bomb:
    def __reduce__(self) -> Any:
        return explode, ()


class Log(Actor):
    """Remembers what it was told."""

    def __init__(self, first: object = None) -> None:
        self.seen: list[object] = [first] if first is not None else []

    @endpoint
    def add(self, item: object) -> object:
        self.seen.append(item)
        return item

    @endpoint
    def add_through(self, port: Port[object], item: object) -> None:
        port.send(item)

    @endpoint(explicit_response_port=True)
    def add_explicit(self, port: Port[object], item: object) -> str:
        self.seen.append(item)
        port.send(("explicit", item))
        return "ignored"

    @endpoint
    def get(self) -> list[object]:
        return self.seen

    @endpoint
    def fail(self, ranks: list[int] | None = None, message: str = "on purpose") -> int:
        rank = current_rank().rank
        if ranks is None or rank in ranks:
            raise ValueError(message)
        return rank

    @endpoint
    def fail_as(self, kind: str) -> object:
        if kind == "unpicklable error":
            raise UnpicklableError("its text")
        if kind == "badly unpickled error":
            raise BadlyUnpickled(1, 2)
        if kind == "unpicklable result":
            return Unpicklable()
        if kind == "explosive result":
            return Bomb()
        if kind == "chained":
            try:
                {}["the cause"]
            except KeyError as error:
                raise ValueError("the effect") from error
        raise SpecialExit(kind)

    @endpoint
    def ranks(self) -> tuple[str, str, dict[str, int], str, str]:
        here = context().actor_instance
        return str(current_rank()), str(here.rank), current_size(), str(here), current_actor_name()

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def rank(self) -> int:
        return current_rank().rank

    @endpoint
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def plain(self, item: object) -> object:
        return ("plain", item)

    def plain_explicit(self, port: Port[object], item: object) -> None:
        port.send(("plain explicit", item))

    async def plain_async(self) -> None:
        return


class AsyncLog(Actor):
    """The same, on an event loop."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.gate = asyncio.Event()

    @endpoint
    async def add(self, item: object) -> object:
        self.seen.append(item)
        return item

    @endpoint
    async def get(self) -> list[object]:
        return self.seen

    @concurrent_endpoint
    async def wait_for_gate(self, item: object) -> object:
        self.seen.append(item)
        await self.gate.wait()
        return item

    @endpoint
    async def open_gate(self) -> None:
        self.gate.set()

    @concurrent_endpoint
    async def fail_later(self, kind: str) -> None:
        await asyncio.sleep(0)
        if kind == "exception":
            raise ValueError("on purpose")
        raise asyncio.CancelledError

    @concurrent_endpoint(explicit_response_port=True)
    async def answer_twice(self, port: Port[int]) -> None:
        port.send(1)
        await asyncio.sleep(0)
        port.send(2)

    @concurrent_endpoint(explicit_response_port=True)
    async def fail_explicit(self, port: Port[int]) -> None:
        raise ValueError("out of an explicit endpoint")

    @endpoint
    async def cancelled(self) -> None:
        raise asyncio.CancelledError

    @endpoint
    async def background(self) -> None:
        asyncio.get_running_loop().call_soon(self.seen.append, "background")

    @endpoint
    async def fail(self) -> None:
        raise ValueError("on purpose")

    def plain(self) -> str:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return "no loop"
        return "loop"


class Caller(Actor):
    """Calls other actors, which were sent to it."""

    @endpoint
    def call(self, other: Any, item: object) -> object:
        return other.add.call(item).get().values()

    @endpoint
    def add_many(self, other: Any, name: str, count: int) -> None:
        for number in range(count):
            other.add.broadcast((name, number))
        other.add.call((name, count)).get()

    @endpoint
    def sum_pids(self, other: Any) -> int:
        return Accumulator(other.pid, 0, lambda total, pid: total + pid).accumulate().get()

    @endpoint
    def spawn_on(self, procs: ProcMesh, item: object) -> Any:
        self.mine = procs.spawn("grandchild", Log, item)
        return self.mine

    @endpoint
    def send_to(self, port: Port[object], items: list[object]) -> None:
        for item in items:
            port.send(item)


class Parent(Actor):
    """Owns procs with actors on them."""

    def __init__(self, folder: str = "", behaviour: str = "") -> None:
        self.folder = Path(folder) if folder else None
        self.behaviour = behaviour
        self.failures: list[str] = []
        self.changed = threading.Condition()

    @endpoint
    def start(self, count: int = 1, kind: type[Actor] = Log, *args: Any) -> list[int]:
        self.procs = this_host().spawn_procs({"n": count}, name="inner")
        self.children: Any = self.procs.spawn("child", kind, *args)
        return self.children.pid.call().get().values()

    @endpoint
    def mesh(self) -> Any:
        return self.children

    @endpoint
    def start_here(self) -> list[object]:
        self.local: Any = this_proc().spawn("local", Log, "here")
        return [self.local.get.call_one().get(), str(this_host().extent), str(this_proc().extent)]

    @endpoint
    def told(self) -> list[str]:
        return self.failures

    @endpoint
    def ask_children(self) -> str:
        try:
            self.children.get.call().get()
        except RuntimeError as error:
            return str(error)
        return "they answered"

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.failures.append(failure.report())
        if self.behaviour == "raise":
            raise RuntimeError("raised while it supervised")
        return self.behaviour == "handle"

    def __cleanup__(self, error: Exception | None) -> None:
        if self.folder is not None:
            alive = [pid for pid in getattr(self, "pids", []) if Path(f"/proc/{pid}").exists()]
            (self.folder / f"parent-{os.getpid()}").write_text(f"{error!r} {alive}")

    @endpoint
    def remember(self, pids: list[int]) -> None:
        self.pids = pids


class AsyncParent(Actor):
    """The same, on an event loop."""

    def __init__(self, behaviour: str) -> None:
        self.behaviour = behaviour
        self.failures: list[str] = []

    @endpoint
    async def start(self) -> list[int]:
        self.procs = this_host().spawn_procs({"n": 1}, name="inner")
        self.children: Any = self.procs.spawn("child", Log)
        return (await self.children.pid.call()).values()

    @endpoint
    async def told(self) -> list[str]:
        return self.failures

    async def __supervise__(self, failure: MeshFailure) -> bool:
        await asyncio.sleep(0)
        self.failures.append(failure.report())
        if self.behaviour == "raise":
            raise RuntimeError("raised while it supervised")
        return self.behaviour == "handle"


class Cleaner(Actor):
    """Tells a folder of its cleanup."""

    def __init__(self, folder: str, behaviour: str = "") -> None:
        self.folder = Path(folder)
        self.behaviour = behaviour

    @endpoint
    def work(self, seconds: float = 0.0) -> int:
        time.sleep(seconds)
        return os.getpid()

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def fail(self) -> None:
        raise ValueError("on purpose")

    def __cleanup__(self, error: Exception | None) -> None:
        (self.folder / f"cleanup-{os.getpid()}").write_text(repr(error))
        if self.behaviour == "hang":
            threading.Event().wait()
        if self.behaviour == "raise":
            raise RuntimeError("raised in cleanup")


class AsyncCleaner(Actor):
    def __init__(self, folder: str, behaviour: str = "") -> None:
        self.folder = Path(folder)
        self.behaviour = behaviour

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def wait_for_ever(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            (self.folder / f"task-{os.getpid()}").write_text("cancelled")

    async def __cleanup__(self, error: Exception | None) -> None:
        tasks = sorted(path.name for path in self.folder.glob("task-*"))
        (self.folder / f"cleanup-{os.getpid()}").write_text(f"{error!r} {len(tasks)}")
        if self.behaviour == "hang":
            await asyncio.Event().wait()


class BadInit(Actor):
    def __init__(self, ranks: list[int] | None = None) -> None:
        if ranks is None or context().actor_instance.rank.rank in ranks:
            raise ValueError("no good init")

    @endpoint
    def get(self) -> str:
        return "fine"


class Dier(Actor):
    """Ends its process in various ways."""

    @endpoint
    def die(self, how: str) -> None:
        print(f"about to {how}", file=sys.stderr, flush=True)
        if how == "exit":
            os._exit(3)
        if how == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "sigsegv":
            import ctypes

            ctypes.string_at(0)
        if how == "abort":
            os.abort()
        raise AssertionError(how)

    @endpoint
    def send_and_die(self, port: Port[int], count: int) -> None:
        for number in range(count):
            port.send(number)
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def hold_gil(self) -> None:
        import ctypes

        ctypes.PyDLL(None).usleep(3_600_000_000)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def get(self) -> str:
        return "alive"

    @endpoint
    def start_children(self) -> list[int]:
        """A child in the proc's own process group, one in a session of its own, and an orphan."""
        sleep = ["sleep", "1000"]
        same = subprocess.Popen(sleep).pid
        own = subprocess.Popen(sleep, start_new_session=True).pid
        # The orphan's output goes nowhere, or its parent's output would never end.
        code = (
            "from subprocess import *;"
            "print(Popen(['sleep', '1000'], stdout=DEVNULL, stderr=DEVNULL, start_new_session=True).pid)"
        )
        orphan = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        return [same, own, orphan]


class Environment(Actor):
    """Tells of the process that it runs in."""

    @endpoint
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @endpoint
    def place(self) -> tuple[str, list[int], list[str]]:
        return os.getcwd(), sorted(os.sched_getaffinity(0)), sys.path

    @endpoint
    def say(self, text: str, stream: str) -> None:
        print(text, file=getattr(sys, stream), flush=True)

    @endpoint
    def flood(self, lines: int) -> None:
        for number in range(lines):
            print(f"line {number} {'x' * 200}")
        sys.stdout.flush()

    @endpoint
    def import_it(self, name: str) -> str:
        return __import__(name).__file__ or ""


class Executables(Actor):
    """Tells whether a Python that sets MY_PYTHON runs it, and the procs that it spawns."""

    @endpoint
    def get(self) -> tuple[str | None, str | None]:
        with this_host().spawn_procs() as procs:
            inner: Any = procs.spawn("inner", Executables)
            return os.environ.get("MY_PYTHON"), inner.own.call_one().get()

    @endpoint
    def own(self) -> str | None:
        return os.environ.get("MY_PYTHON")


class AnyName(Actor):
    """Its argument has a name that spawn() itself might use."""

    def __init__(self, actor_class: str) -> None:
        self._given = actor_class

    @endpoint
    def look(self) -> str:
        return self._given
