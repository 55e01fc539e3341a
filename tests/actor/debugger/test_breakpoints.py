"""Whole programs whose ranks stop, and people who debug them from this and that terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from support import DEADLINE, REPOSITORY, Program, wait_until
from terminal import Terminal

PROGRAM = """
    import os, threading
    from monarch_slurm.actor import Actor, endpoint, this_host

    class Trainer(Actor):
        @endpoint
        def pid(self):
            return os.getpid()

        @endpoint
        def step(self, x):
            loss = x * 1
            breakpoint()
            loss += 1
            return self.check(loss)

        def check(self, loss):
            if loss < 0:
                raise ValueError("negative")
            return loss

    procs = this_host().spawn_procs({"gpus": 3}, name="procs")
    trainers = procs.spawn("trainer", Trainer)
    print("pids", *[pid for _, pid in trainers.pid.call().get()])
    answers = [trainers.slice(gpus=gpu).step.call_one(10 * (1 + gpu)) for gpu in range(3)]
    for answer in answers:
        try:
            print("answer", answer.get())
        except Exception as error:
            print("answer", type(error).__name__, str(error).strip().splitlines()[-1])
    print("done")
"""

TOLERANT = PROGRAM.replace(
    "    procs = this_host",
    "    import monarch_slurm.actor as a\n    a.unhandled_fault_hook = lambda failure: None\n    procs = this_host",
)
"""It goes on when a rank dies."""

Start = Callable[[str], Program]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started = []

    def run(text: str) -> Program:
        started.append(Program(tmp_path, text))
        return started[-1]

    yield run
    for program in started:
        program.close()


class Person:
    """``monarch-slurm debug`` with commands through a pipe. It answers each before it reads the next."""

    def __init__(self, pid: int) -> None:
        command = [sys.executable, "-u", "-m", "monarch_slurm", "debug", "--pid", str(pid)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
        )
        os.set_blocking(self.stdout.fileno(), False)
        self.text = ""
        self.seen = 0

    @property
    def stdout(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")

    def expect(self, text: str) -> None:
        """Wait for ``text`` in what has been printed since the last."""

        def look() -> bool:
            self.text += os.read(self.stdout.fileno(), 2**16).decode() if _readable(self.stdout) else ""
            return text in self.text[self.seen :]

        wait_until(look, f"{text!r} in:\n{self.text}")
        self.seen = self.text.index(text, self.seen) + len(text)

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = self.process.wait(DEADLINE)
        self.stdout.close()
        return code


def _readable(stream: IO[str]) -> bool:
    import select

    return bool(select.select([stream], [], [], 0)[0])


@pytest.fixture
def person() -> Iterator[Callable[[Program], Person]]:
    people = []

    def sit_down(program: Program) -> Person:
        people.append(Person(program.process.pid))
        return people[-1]

    yield sit_down
    for one in people:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def commands(program: Program, *lines: str) -> str:
    """What a debugger prints that is given these commands."""
    done = subprocess.run(
        [sys.executable, "-m", "monarch_slurm", "debug", "--pid", str(program.process.pid)],
        input="".join(f"{line}\n" for line in lines), capture_output=True, text=True, timeout=DEADLINE,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def until_stopped(program: Program, count: int) -> str:
    """The list of stopped ranks, once so many are stopped."""

    def look() -> str:
        rows = commands(program, "quit").splitlines()[1:]
        return "\n".join(rows) if len(rows) == count else ""

    return str(wait_until(look))


def test_ranks_are_listed_attached_cast_to_and_continued(start: Start) -> None:
    program = start(PROGRAM)
    pids = program.expect("pids").split()
    rows = until_stopped(program, 3).splitlines()
    assert [row.split()[:3] for row in rows] == [["trainer", str(rank), f"gpus={rank}"] for rank in range(3)]
    assert all("step" in row and "program.py:1" in row for row in rows)
    wait_until(lambda: "ranks 0-2 of trainer: stopped at" in program.errors())
    assert f"`monarch-slurm debug --pid {program.process.pid}` on " in program.errors()

    text = commands(
        program, "attach trainer 1", "p loss, x", "where", "next", "list", "p self", "detach",
        "cast trainer ranks(gpus=(0,2)) p loss", "cast trainer ranks(:) loss = -5", "cast trainer ranks(0:3) p loss",
        "cast trainer ranks(1) p 'long' * 10_000_000", "cast trainer ranks(7) p loss",
        "attach trainer 9", "attach", "cast trainer", "nonsense", "help",
    )  # fmt: skip
    assert f"rank 1 of trainer on {os.uname().nodename} (pid {pids[1]})" in text
    assert "(20, 20)" in text
    assert "sync_cell" not in text, "where shows the user's frames"
    assert "-> return self.check(loss)" in text
    assert "loss = x * 1" in text, "what list shows while attached"
    assert "<__main__.Trainer object" in text
    assert "detached; rank 1 of trainer stays stopped" in text
    assert "rank 0 of trainer: 10\nrank 2 of trainer: 30\n" in text
    assert "ranks 0-2 of trainer: -5\n" in text
    assert "more characters are left out" in text
    assert "no rank of 'trainer' that is meant is stopped" in text
    assert "no stopped rank is called 'trainer 9'" in text
    assert "unknown command 'nonsense'" in text

    assert "ranks 0-2 of trainer: goes on" in commands(program, "cast trainer ranks(1) loss = 3", "continue")
    text = until_stopped(program, 2)  # ranks 0 and 2 fail, and are looked at where they do
    assert all("check" in row for row in text.splitlines())
    assert "the call has failed: ValueError: negative" in commands(program, "attach trainer 0", "p loss")
    commands(program, "continue")
    program.expect("done")
    failed = "answer ActorError ValueError: negative"
    assert program.output().splitlines()[1:4] == [failed, "answer 3", failed]
    assert program.wait() == 0
    program.check_gone()


def test_a_rank_that_dies_is_told_and_the_others_stay(start: Start, person: Any) -> None:
    program = start(TOLERANT)
    pids = [int(pid) for pid in program.expect("pids").split()]
    until_stopped(program, 3)
    me = person(program)
    me.expect("FUNCTION")
    me.say("attach trainer 1")
    me.expect("rank 1 of trainer on")
    os.kill(pids[1], signal.SIGKILL)
    me.say("p 6 * 7")  # it has died by then, or dies meanwhile
    me.expect("rank 1 of trainer has ended: Killed(sig=9)")
    me.say("attach trainer 2")
    me.expect("rank 2 of trainer on")
    me.say("p loss")
    me.expect("30")
    me.say("continue")
    me.expect("rank 2 of trainer goes on")
    os.kill(pids[0], signal.SIGKILL)
    me.end()
    program.expect("done")
    assert program.output().splitlines()[3] == "answer 31"


def test_whoever_comes_takes_over_and_whoever_leaves_leaves_ranks_stopped(start: Start, person: Any) -> None:
    program = start(PROGRAM)
    program.expect("pids")
    until_stopped(program, 3)
    first = person(program)
    first.expect("FUNCTION")
    first.say("attach trainer 0")
    first.expect("rank 0 of trainer on")
    second = person(program)
    second.expect("FUNCTION")
    first.expect("another terminal debugs this program now")
    assert first.process.wait(DEADLINE) == 0
    second.say("attach trainer 0")
    second.expect("rank 0 of trainer on")
    second.process.kill()  # as if its window was closed
    second.process.wait()
    assert "10" in commands(program, "attach trainer 0", "p loss", "detach", "continue")
    program.expect("done")
    assert program.wait() == 0


def test_line_editing_and_ctrl_c_in_a_terminal(start: Start, tmp_path: Path) -> None:
    program = start(PROGRAM)
    program.expect("pids")
    until_stopped(program, 3)
    terminal = Terminal(sys.executable, "-m", "monarch_slurm", "debug", "--pid", str(program.process.pid))
    try:
        terminal.expect("debug> ")
        terminal.interrupt()
        terminal.expect("debug> ")
        terminal.type("attach trainer 2")
        terminal.expect(r"\(Pdb\) ")
        asleep = tmp_path / "asleep"
        terminal.type(f"__import__('pathlib').Path({str(asleep)!r}).touch(), __import__('time').sleep(1000)")
        wait_until(asleep.exists)
        terminal.interrupt()
        terminal.expect("detached; rank 2 of trainer runs")
        terminal.expect("debug> ")
        terminal.type("attach trainer 1")
        terminal.expect(r"\(Pdb\) ")
        terminal.type("p 'lo' + 'ss', loss")
        terminal.expect(r"\('loss', 20\)")
        terminal.interrupt()
        terminal.expect("detached; rank 1 of trainer stays stopped")
        terminal.type("quit")
        wait_until(lambda: not _is_child(terminal.pid))
    finally:
        terminal.close_quietly()
    assert program.process.poll() is None


def test_a_rank_dies_under_the_hands_of_a_person(start: Start) -> None:
    program = start(TOLERANT)
    pids = [int(pid) for pid in program.expect("pids").split()]
    until_stopped(program, 3)
    terminal = Terminal(sys.executable, "-m", "monarch_slurm", "debug", "--pid", str(program.process.pid))
    try:
        terminal.expect("debug> ")
        terminal.type("attach trainer 1")
        terminal.expect(r"\(Pdb\) ")
        terminal.keys("p lo")
        terminal.expect("p lo")
        os.kill(pids[1], signal.SIGKILL)
        terminal.expect(r"rank 1 of trainer has ended: Killed\(sig=9\)")
        terminal.expect("debug> p lo")  # what was typed is there still
        terminal.interrupt_until("debug> ")
        terminal.type("quit")
        wait_until(lambda: not _is_child(terminal.pid))
    finally:
        terminal.close_quietly()


def _is_child(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


@pytest.mark.parametrize("how", ["continue", "interrupt"])
def test_the_terminal_of_the_program_itself(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    script = tmp_path / "program.py"
    script.write_text(__import__("textwrap").dedent(PROGRAM))
    terminal = Terminal(sys.executable, str(script))
    try:
        terminal.expect(r"ranks? [0-2].* of trainer: stopped at .*program.py:1[34] in step")
        terminal.expect("debug> ")
        terminal.type("attach trainer 0")
        terminal.expect(r"\(Pdb\) ")
        terminal.type("p loss * 1000")
        terminal.expect("10000\n")
        terminal.expect(r"\(Pdb\) ")
        if how == "interrupt":
            terminal.interrupt()  # ends the program, as always
            terminal.expect("KeyboardInterrupt")
        else:
            terminal.type("continue")
            terminal.expect("rank 0 of trainer goes on")
            deadline = time.monotonic() + DEADLINE
            while "done" not in terminal.text and time.monotonic() < deadline:
                terminal.type("continue")  # ranks that came later, too
                terminal.expect("(goes on|stopped|done)")
        wait_until(lambda: not _is_child(terminal.pid))
    finally:
        terminal.close_quietly()


PLACES = """
    import asyncio, os, sys, threading, types
    from monarch_slurm.actor import Actor, debug_controller, endpoint, this_host, this_proc

    def bootstrap():
        mark = "bootstrap"
        breakpoint()
        os.environ["MARK"] = mark

    class Async(Actor):
        def __init__(self):
            self.marks = []

        @endpoint
        async def work(self):
            mark = "async"
            await asyncio.sleep(0)
            breakpoint()
            await asyncio.sleep(0)
            thread = threading.Thread(target=self.aside)
            thread.start()
            await asyncio.to_thread(thread.join)
            return [mark, os.environ.get("MARK"), *self.marks]

        def aside(self):
            mark = "thread"
            breakpoint()
            self.marks.append(mark)

    class Here(Actor):
        @endpoint
        def work(self):
            mark = "here"
            breakpoint()
            return mark

    class NoFile(Actor):
        @endpoint
        def work(self):
            scope = {}
            text = "def f():\\n  mark = 'none'\\n  breakpoint()\\n  return mark"
            exec(compile(text, "/nowhere/gone.py", "exec"), scope)
            return scope["f"]()

    procs = this_host().spawn_procs(name="places", bootstrap=bootstrap)
    answers = [procs.spawn("async", Async).work.call_one(), this_proc().spawn("here", Here).work.call_one(),
               procs.spawn("nofile", NoFile).work.call_one()]
    debug_controller().wait_pending_session.call_one().get()
    print("pending", len(debug_controller().list.call_one(print_output=False).get()))
    print("answers", *[answer.get() for answer in answers])
    procs.stop().get()
"""


def test_wherever_code_runs(start: Start) -> None:
    program = start(PLACES)
    marked: dict[str, str] = {}
    program.expect("pending")

    def visit() -> bool:
        """Change the mark of every rank that is stopped, and let it go on."""
        for row in commands(program).splitlines()[1:]:
            name, rank = row.split()[:2]
            text = commands(program, f"attach {name} {rank}", "p mark", "mark = mark.upper()", "p mark", "continue")
            marked[name.partition("-")[0]] = text
        return "answers" in program.output()

    wait_until(visit)
    assert program.expect("answers") == "['ASYNC', 'BOOTSTRAP', 'THREAD'] HERE NONE"
    assert {"async", "here", "nofile", "places"} <= set(marked)
    assert program.wait() == 0


def test_a_mesh_with_a_stopped_rank_can_be_stopped_at_once(start: Start) -> None:
    program = start(PROGRAM.replace("    for answer", "    input_gone = procs.stop()\n    for answer").replace(
        "answers = [", "import time; from monarch_slurm.actor import debug_controller\n    answers = [").replace(
        "    input_gone", "    debug_controller().wait_pending_session.call_one().get()\n    input_gone"))  # fmt: skip
    program.expect("done")
    assert program.output().count("answer ") == 3
    assert program.wait() == 0
    program.check_gone()
