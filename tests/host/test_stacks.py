from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from support import wait_until

from monarch_slurm.host.stacks import Frame, StackDump, Stacks, parse_dump

Start = Callable[[str], subprocess.Popen[str]]

PRELUDE = """
import ctypes, signal, threading, time
from monarch_slurm.host.stacks import register_stacks

def register():
    register_stacks()
    print("ready", flush=True)

def inner(call):
    call()
"""


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python programs and waits until they have printed ``ready``."""
    started = []

    def run(text: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", PRELUDE + text], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def dump(pid: int, until: Callable[[Stacks], bool] = lambda stacks: True) -> Stacks:
    """The stacks of a process, asked for again until they are as expected."""

    def once() -> Stacks | None:
        asked = StackDump(pid)
        wait_until(asked.poll)
        return asked.stacks if until(asked.stacks) else None

    found: Stacks = wait_until(once)
    return found


def functions(stacks: Stacks) -> list[list[str]]:
    return sorted([frame.function for frame in thread.frames] for thread in stacks.threads)


def test_threads_and_frames_of_what_faulthandler_writes() -> None:
    text = (
        "Thread 0x00007f01 [loader] (most recent call first):\n"
        '  File "/a b/c.py", line 12 in read\n  File "/d.py", line ??? in <module>\n\n'
        "Current thread 0x00007f02 (most recent call first):\n  <no Python frame>\n"
    )
    loader, current = parse_dump(text)
    assert (loader.id, loader.name, current.id, current.frames) == (0x7F01, "loader", 0x7F02, [])
    assert loader.frames == [Frame("/d.py", 0, "<module>"), Frame("/a b/c.py", 12, "read")]


@pytest.mark.parametrize(
    "call",
    [
        pytest.param("lambda: time.sleep(1000)", id="sleeping"),
        pytest.param("lambda: ctypes.PyDLL(None).sleep(1000)", id="holding the GIL in C code"),
        pytest.param("lambda: exec('while True: pass')", id="busy"),
        pytest.param("threading.Lock().__enter__ and threading.Event().wait", id="waiting for another thread"),
    ],
)
def test_where_a_process_is_whatever_it_does(start: Start, call: str) -> None:
    process = start(f"register()\ninner({call})")
    stacks = dump(process.pid, lambda stacks: "inner" in str(stacks))
    assert not stacks.note
    assert [names[:2] for names in functions(stacks)] == [["<module>", "inner"]]
    assert process.poll() is None


def test_all_threads_and_again(start: Start) -> None:
    process = start(
        "for _ in range(3): threading.Thread(target=inner, args=(threading.Event().wait,), daemon=True).start()\n"
        "register()\ninner(lambda: time.sleep(1000))"
    )
    for _ in range(20):
        stacks = dump(process.pid, lambda stacks: str(stacks).count("'inner'") == 4)
        assert len(stacks.threads) == 4
    assert Stacks.from_fields(stacks.to_fields()) == stacks


def test_a_stopped_process_is_said_to_be_one_and_goes_on(start: Start) -> None:
    process = start("register()\ninner(lambda: time.sleep(1000))")
    process.send_signal(signal.SIGSTOP)
    assert "SIGSTOP" in dump(process.pid, lambda stacks: not stacks.threads).note
    process.send_signal(signal.SIGCONT)
    assert functions(dump(process.pid, lambda stacks: "inner" in str(stacks)))[0][1] == "inner"


def test_a_process_that_blocks_the_signal_is_given_up(start: Start) -> None:
    process = start(
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nregister()\ninner(lambda: time.sleep(1000))"
    )
    asked = StackDump(process.pid)
    assert not asked.poll()
    asked.give_up()
    assert "has not written its stacks" in asked.stacks.note


def test_a_process_that_is_not_ready_is_not_killed_by_the_question(start: Start) -> None:
    process = start("print('ready', flush=True)\ntime.sleep(1000)")
    asked = StackDump(process.pid)
    assert asked.poll()
    assert "starting" in asked.stacks.note
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert "ended" in StackDump(process.pid).stacks.note


def test_two_askers_at_once_get_whole_stacks_or_are_told(start: Start) -> None:
    process = start("signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nregister()\ntime.sleep(1000)")
    first = StackDump(process.pid)
    second = StackDump(process.pid)
    assert not first.poll()
    assert "somebody else" in second.stacks.note
    first.give_up()
