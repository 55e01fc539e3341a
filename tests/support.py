"""What tests of several layers use: waiting for conditions, running whole programs, looking at processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from monarch_slurm.cli import main

REPOSITORY = Path(__file__).parent.parent
DEADLINE = 60.0


def wait_until(condition: Callable[[], Any], what: str = "", deadline: float = DEADLINE) -> Any:
    """Return the first true value of ``condition``; fail when it does not come."""
    end = time.monotonic() + deadline
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"not within {deadline:g} s: {what or condition}"
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be reaped does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_gone(*pids: int) -> None:
    """Wait until no process of ``pids`` is there any more, not even as a zombie."""
    for pid in pids:
        wait_until(lambda pid=pid: not psutil.pid_exists(pid), f"the end of process {pid}")


def hold(pid: int) -> None:
    """Stop a process by SIGSTOP, and wait until none of its threads does anything any more."""
    os.kill(pid, signal.SIGSTOP)

    def is_held() -> bool:
        try:
            stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
        except (FileNotFoundError, ProcessLookupError):  # a thread has ended meanwhile
            return False
        return {stat.rpartition(")")[2].split()[0] for stat in stats} == {"T"}

    wait_until(is_held, f"all threads of process {pid} are held")


def descendants(pid: int) -> list[int]:
    """Pids of all processes under ``pid``."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def socket_folders() -> set[str]:
    """Folders of Unix sockets that are there now."""
    return {str(path) for path in Path(os.environ["XDG_RUNTIME_DIR"]).glob(f"ms-{os.getuid()}-*")}


def run_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str]:
    """Run ``monarch-slurm`` in this process; return its exit code and all that it prints."""
    monkeypatch.setattr("sys.argv", ["monarch-slurm", *arguments])
    code = 0
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out + captured.err


class Program:
    """A Python program of its own process, in a folder of its own.

    It prints lines that `expect` waits for. Everything that it started must be gone when it is: `check_gone` looks.
    """

    def __init__(self, folder: Path, text: str, *, env: dict[str, str] | None = None) -> None:
        script = folder / "program.py"
        script.write_text(textwrap.dedent(text))
        self.stdout, self.stderr = folder / "stdout", folder / "stderr"
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1", **(env or {})}
        with open(self.stdout, "wb") as stdout, open(self.stderr, "wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(script)],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        self.family: set[int] = set()

    def output(self) -> str:
        return self.stdout.read_text()

    def errors(self) -> str:
        return self.stderr.read_text()

    def expect(self, start: str) -> str:
        """Wait for a line that begins with ``start``; return the rest of it."""

        def find() -> str | None:
            for line in self.output().splitlines():
                if line.startswith(start):
                    return line[len(start) :].strip() or " "
            assert self.process.poll() is None, f"ended without {start!r}:\n{self.output()}\n{self.errors()}"
            return None

        found: str = wait_until(find, f"the line {start!r}; {self.errors()}")
        self.note_family()
        return found.strip()

    def note_family(self) -> None:
        """Remember all processes that are under it now."""
        try:
            self.family.update(descendants(self.process.pid))
        except psutil.NoSuchProcess:
            return

    def wait(self, deadline: float = DEADLINE) -> int:
        """Wait for its end and return its exit code."""
        try:
            return self.process.wait(deadline)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {deadline:g} s:\n{self.output()}\n{self.errors()}") from None

    def signal(self, number: int) -> None:
        self.note_family()
        self.process.send_signal(number)

    def check_gone(self) -> None:
        """Wait until nothing that it was seen to start is there any more."""
        wait_gone(*self.family)

    def close(self) -> None:
        if self.process.poll() is None:
            self.note_family()
            self.process.kill()
            self.process.wait()
        for pid in self.family:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
