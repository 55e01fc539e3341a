from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import Program

from monarch_slurm.errors import ConfigError
from monarch_slurm.job import SAVED, save_on_notice

WAITS = """
    import os, sys, threading, time
    from monarch_slurm.job import save_on_notice

    def save():
        print("saving on", threading.current_thread().name, flush=True)
        while not os.path.exists("go"):
            time.sleep(0.01)
        if "fail" in os.environ.get("HOW", ""):
            raise ValueError("no space")

    try:
        with save_on_notice(save):
            print("up", flush=True)
            threading.Event().wait()  # what is waited for never comes
    finally:
        print("tidied up", flush=True)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    started: list[Program] = []

    def run(text: str = WAITS, **env: str) -> Program:
        started.append(Program(tmp_path, text, env=env))
        return started[-1]

    yield run
    for program in started:
        program.close()


def test_the_program_saves_and_ends(start, tmp_path: Path) -> None:
    program = start()
    program.expect("up")
    program.signal(signal.SIGTERM)
    assert program.expect("saving on") == "save-on-notice"
    (tmp_path / "go").touch()
    assert program.wait() == SAVED
    assert program.output().endswith("tidied up\n")


def test_a_save_that_fails_is_an_error(start, tmp_path: Path) -> None:
    program = start(HOW="fail")
    program.expect("up")
    (tmp_path / "go").touch()
    program.signal(signal.SIGTERM)
    assert program.wait() == 1
    assert "ValueError: no space" in program.errors()


@pytest.mark.parametrize("inside", [False, True])
def test_a_second_signal_ends_the_program_but_for_jobs(start, tmp_path: Path, inside: bool) -> None:
    program = start(**({"MONARCH_BATCH_JOB": "1"} if inside else {}))
    program.expect("up")
    program.signal(signal.SIGTERM)
    program.expect("saving on")
    program.signal(signal.SIGTERM)
    if inside:
        (tmp_path / "go").touch()
    assert program.wait() == (SAVED if inside else 128 + signal.SIGTERM)


def test_a_program_that_is_done_before_it_has_saved_ends_as_it_would(start) -> None:
    program = start("""
        import os, signal, threading
        from monarch_slurm.job import save_on_notice

        saving, go = threading.Event(), threading.Event()
        with save_on_notice(lambda: (saving.set(), go.wait())):
            os.kill(os.getpid(), signal.SIGTERM)
            saving.wait()
        go.set()
        print("done", flush=True)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    """)
    assert program.wait() == 0
    assert program.output() == "done\n"


def test_only_the_main_thread_gets_signals() -> None:
    errors: list[ConfigError] = []

    def elsewhere() -> None:
        try:
            with save_on_notice(lambda: None):
                raise AssertionError("the block was entered")
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(errors) == 1
