"""Debuggers of a program's own: pdb whose input and output go through the endpoints of the controller."""

from __future__ import annotations

import pdb
import queue
import threading
from typing import Any

import pytest
from support import DEADLINE, wait_until

from monarch_slurm.actor import ActorError, context, debug_controller
from monarch_slurm.actor.client import client
from monarch_slurm.actor.context import set_context
from monarch_slurm.actor.debugger.own import DebuggerWrite
from monarch_slurm.actor.debugger.shell import DebugShell


class Files:
    """What pdb takes for its files."""

    def __init__(self, name: str, rank: int) -> None:
        self.who = name, rank

    def write(self, text: str) -> None:
        written = DebuggerWrite(text.encode(), "sample.work", 17)
        debug_controller().debugger_write.call_one(*self.who, written).get(DEADLINE)

    def flush(self) -> None:
        return

    def readline(self) -> str:
        line = b""
        while not line.endswith(b"\n"):
            got = debug_controller().debugger_read.call_one(*self.who, 4).get(DEADLINE)
            if got == "detach":
                return ""
            line += got.payload
        return line.decode()


def test_a_debugger_of_the_users_own() -> None:
    controller = debug_controller()
    here = context()

    def work() -> None:
        set_context(here)
        controller.debugger_session_start.call_one(2, {"gpus": 2}, "n7", "mine").get(DEADLINE)
        files: Any = Files("mine", 2)
        found = {"answer": 41}
        pdb.Pdb(stdin=files, stdout=files).run("answer = answer + 1", found, found)
        ended.put(found["answer"])
        controller.debugger_session_end.call_one("mine", 2).get(DEADLINE)

    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    thread = threading.Thread(target=work)
    thread.start()
    wait_until(lambda: client().desk.stopped(), "it waits for a person")
    (session,) = controller.list.call_one(print_output=False).get(DEADLINE)
    assert (session.actor_name, session.rank, session.coords, session.hostname) == ("mine", 2, {"gpus": 2}, "n7")
    assert (session.function, session.lineno) == ("sample.work", 17)

    shown: list[str] = []
    shell = DebugShell(client().desk, lambda text, prompt: shown.append(text + prompt), until_all_go_on=True)
    person = threading.Thread(target=shell.run)
    person.start()
    for line, answer in [("attach mine 2", "(Pdb) "), ("p answer * 1000", "41000"), ("continue", "goes on")]:
        shell.events.put(line)
        wait_until(lambda answer=answer: answer in "".join(shown), f"{answer!r} in {shown}")  # type: ignore[misc]
    assert ended.get(timeout=DEADLINE) == 42
    thread.join(DEADLINE)
    person.join(DEADLINE)
    assert not client().desk.stopped()


def test_whoever_reads_when_the_session_ends_is_told() -> None:
    controller = debug_controller()
    controller.debugger_session_start.call_one(0, {}, "n7", "other").get(DEADLINE)
    reading = controller.debugger_read.call_one("other", 0, 10)
    wait_until(lambda: client().desk.stopped())
    controller.debugger_session_end.call_one("other", 0).get(DEADLINE)
    assert reading.get(DEADLINE) == "detach"
    with pytest.raises(ActorError, match="no debugger of other 0 has been started"):
        controller.debugger_read.call_one("other", 0, 10).get(DEADLINE)
