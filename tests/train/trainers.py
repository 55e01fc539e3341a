"""Trainers in processes of their own, for tests: a real Lighthouse, real sockets, real deaths.

Run as a program, this file is a zygote: it preloads the engine, then forks a trainer for every line on its standard
input, and tells the trainers' events and ends on its standard output, one JSON object per line.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from monarch_slurm.train.config import Place, TrainConfig

Event = dict[str, Any]
DEADLINE = 60.0  # seconds after which a test gives up waiting; nothing waits this long unless it fails


@dataclass
class Trainer:
    """One trainer process and what it has told."""

    number: int
    place: Place
    events: list[Event] = field(default_factory=list)
    pid: int = 0
    status: int | None = None

    def kill(self) -> None:
        """Kill the process as the kernel's OOM killer would."""
        os.kill(self.pid, signal.SIGKILL)

    def held_at(self, step: int) -> bool:
        """Whether it stands still in a step, see `Run.start`."""
        return any(e["step"] == step for e in self.of("held"))

    def of(self, kind: str) -> list[Event]:
        """Return the events of a kind so far."""
        return [e for e in self.events if e["kind"] == kind]

    def only(self, kind: str) -> Event:
        """Return the one event of a kind."""
        (found,) = self.of(kind)
        return found


class Zygote:
    """The process that trainers are forked from."""

    def __init__(self) -> None:
        path = os.pathsep.join(p for p in sys.path if p)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._trainers: dict[int, Trainer] = {}
        self._changed: queue.Queue[None] = queue.Queue()
        self.ready: Event = {}
        threading.Thread(target=self._listen, daemon=True).start()
        self.wait(lambda: bool(self.ready), "the zygote to be ready")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def fork(self, config: TrainConfig, place: Place, **injected: Any) -> Trainer:
        """Fork a trainer; see `Run.start` for what can be injected."""
        trainer = Trainer(len(self._trainers), place)
        self._trainers[trainer.number] = trainer
        request = {"number": trainer.number, "config": config.to_dict(), "place": asdict(place), **injected}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return trainer

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds; it is looked at whenever a trainer has told something or ended."""
        deadline = time.monotonic() + DEADLINE
        while not condition():
            try:
                self._changed.get(timeout=max(deadline - time.monotonic(), 0.01))
            except queue.Empty:
                tails = "\n".join(f"{t.place}: {t.status}, {t.events[-3:]}" for t in self._trainers.values())
                raise AssertionError(f"waited {DEADLINE} s for {what}\n{tails}") from None

    def wait_ended(self, *trainers: Trainer) -> None:
        self.wait(lambda: all(t.status is not None for t in trainers), "the trainers to end")

    def wait_finished(self, *trainers: Trainer) -> list[Event]:
        """Wait for trainers to end well; return their ``finished`` events."""
        self.wait_ended(*trainers)
        assert [t.status for t in trainers] == [0] * len(trainers), [t.of("error") for t in trainers]
        return [t.only("finished") for t in trainers]

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            if told["kind"] == "ready":
                self.ready = told
            else:
                trainer = self._trainers[told.pop("number")]
                if told["kind"] == "forked":
                    trainer.pid = told["pid"]
                elif told["kind"] == "ended":
                    trainer.status = told["status"]
                else:
                    trainer.events.append(told)
            self._changed.put(None)


class Run:
    """A Lighthouse, and the trainers of one run. As a context manager it kills what is left of them at its end."""

    def __init__(self, zygote: Zygote, config: TrainConfig) -> None:
        from monarch_slurm.train.fault_tolerance import start_lighthouse

        self.config, self._zygote = config, zygote
        self._folder = tempfile.TemporaryDirectory()
        self._gate = Path(self._folder.name) / "begin"
        self._news = Path(self._folder.name) / "lost"
        self._trainers: list[Trainer] = []
        self.wait, self.wait_ended, self.wait_finished = zygote.wait, zygote.wait_ended, zygote.wait_finished
        self._lighthouse, self.url = start_lighthouse("127.0.0.1", config)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for trainer in self._trainers:
            self.wait(lambda trainer=trainer: trainer.pid != 0, "a fork")  # type: ignore[misc]
            if trainer.status is None:
                trainer.kill()
        self.wait_ended(*self._trainers)
        self._lighthouse.shutdown()
        self._folder.cleanup()

    def begin(self) -> None:
        """Let the first step begin when all trainers are ready: else the slow ones would miss the first quorum."""
        self.wait(lambda: all(t.of("held") or t.status is not None for t in self._trainers), "all to be ready")
        self._gate.touch()

    def lose_peer(self) -> None:
        """Tell all trainers, again and again from now on, that a peer is lost."""
        self._news.touch()

    def start(
        self,
        replica: int,
        rank: int = 0,
        generation: int = 0,
        *,
        hold: tuple[int, Path] | None = None,
        fail: int | None = None,
        deaf: int | None = None,
        freeze: int | None = None,
        **fields: Any,
    ) -> Trainer:
        """Fork one trainer of the run; one of generation 0 does nothing before `begin`.

        With ``hold`` it stops in the compute phase of that step until the file is there; in step ``fail`` it raises;
        in step ``deaf`` its state server goes away; with its quorum number ``freeze`` it stops as by SIGSTOP.
        """
        place = Place(replica, rank, self.config.procs_per_replica, generation, self.url, **fields)
        holds = {1: str(self._gate)} if generation == 0 else {}
        if hold is not None:
            holds[hold[0]] = str(hold[1])
        trainer = self._zygote.fork(
            self.config, place, holds=holds, fail=fail, deaf=deaf, freeze=freeze, news=str(self._news)
        )
        self._trainers.append(trainer)
        return trainer


def tell(**told: Any) -> None:
    """Write one line in one piece: all processes of a zygote share its output."""
    os.write(1, (json.dumps(told) + "\n").encode())


def train(request: dict[str, Any]) -> int:
    """Run a trainer in this process; return its exit status."""
    from monarch_slurm.train.engine import LlamaEngine

    steps = 0

    def injected() -> None:
        nonlocal steps
        steps += 1
        if steps == request["fail"]:
            raise ArithmeticError("injected\nin a test")
        if steps == request["deaf"]:
            engine._manager.transport._listener.close()
        if str(steps) in request["holds"]:  # JSON has made the number a text
            tell(number=request["number"], kind="held", step=steps)
            while not Path(request["holds"][str(steps)]).exists():
                time.sleep(0.005)

    quorums = 0

    def emit(e: Event) -> None:
        nonlocal quorums
        tell(number=request["number"], **e)
        if e["kind"] == "quorum":
            quorums += 1
            if quorums == request["freeze"]:
                os.kill(os.getpid(), signal.SIGSTOP)

    def take_news() -> None:
        while not Path(request["news"]).exists():
            time.sleep(0.02)
        while True:
            engine.let_go(0.5)
            time.sleep(0.02)

    engine = LlamaEngine(TrainConfig(**request["config"]), Place(**request["place"]), emit, injected)
    before = set(sys.modules)
    threading.Thread(target=take_news, daemon=True).start()
    try:
        engine.run()
    except Exception:  # the engine has told it
        return 1
    finally:
        emit({"kind": "imported", "modules": sorted(set(sys.modules) - before)})
    return 0


def be_zygote() -> None:
    """Preload, then fork and reap until the standard input ends. Nothing here may start a thread."""
    from monarch_slurm.train.engine import preload

    preload()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    tell(kind="ready", threads=len(os.listdir("/proc/self/task")))
    numbers: dict[int, int] = {}
    pending = b""
    while True:
        readable, _, _ = select.select([0, wake_read], [], [])
        if wake_read in readable:
            os.read(wake_read, 4096)
            while numbers:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                tell(kind="ended", number=numbers.pop(pid), status=os.waitstatus_to_exitcode(status))
        if 0 not in readable:
            continue
        received = os.read(0, 1 << 16)
        if not received:
            return
        *lines, pending = (pending + received).split(b"\n")
        for line in lines:
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os._exit(train(request))
            numbers[pid] = request["number"]
            tell(kind="forked", number=request["number"], pid=pid)


if __name__ == "__main__":
    be_zygote()
