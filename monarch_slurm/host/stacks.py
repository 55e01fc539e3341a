"""The Python stacks of a process, as another process of the same user sees them, whatever hangs in it.

Each process registers faulthandler for a real-time signal: its handler is C and needs no GIL, so it runs while some
thread holds the GIL in C code. It writes to an anonymous file (memfd) that the asking process opens through
``/proc/PID/fd``. When the handler has returned is seen in ``/proc/PID/task/*/status``: the signal is not pending any
more, and no thread blocks it that did not before (the kernel blocks a signal while its handler runs).
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import signal
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

STACK_SIGNAL = signal.SIGRTMIN + 7
ANSWER_SECONDS = 2.0
"""What a process gets to write its stacks."""

_FILE_NAME = "monarch-slurm-stacks"
_BIT = 1 << (STACK_SIGNAL - 1)
_THREAD = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


@dataclass(frozen=True)
class Frame:
    """One call: where its execution is."""

    file: str
    line: int
    function: str


@dataclass
class Thread:
    """One Python thread; ``frames`` begins with the outermost call."""

    id: int
    name: str = ""
    frames: list[Frame] = field(default_factory=list)


@dataclass
class Stacks:
    """The stacks of one process.

    Attributes:
        note: why there are none, or what else is to be known; empty if nothing is.
    """

    pid: int
    threads: list[Thread] = field(default_factory=list)
    note: str = ""

    def to_fields(self) -> dict[str, Any]:
        """Return it as plain values for `from_fields`."""
        return asdict(self)

    @staticmethod
    def from_fields(fields: dict[str, Any]) -> Stacks:
        """Return what `to_fields` was called on."""
        threads = [
            Thread(thread["id"], thread["name"], [Frame(**frame) for frame in thread["frames"]])
            for thread in fields["threads"]
        ]
        return Stacks(fields["pid"], threads, fields["note"])


def register_stacks() -> None:
    """Make this process answer to `STACK_SIGNAL`. In a forked process again, for it shares its parent's file."""
    fd = os.memfd_create(_FILE_NAME)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True)


class StackDump:
    """Asks one process for its stacks; `poll` until it is true, or `give_up`. Nothing here waits.

    Args:
        pid: a process of this user that has not been reaped.
    """

    def __init__(self, pid: int) -> None:
        self.stacks = Stacks(pid)
        self._task = Path(f"/proc/{pid}/task")
        self._file = -1
        self._could_take: set[str] = set()
        self._done = not self._ask()

    def poll(self) -> bool:
        """Return whether all is known that can be."""
        if self._done:
            return True
        process = self._status(str(self.stacks.pid))
        if process is None or process["State"] == "Z":
            self.stacks.note = "it has ended meanwhile"
        elif process["State"] in "Tt":
            self.stacks.note = _STOPPED
        elif int(process["ShdPnd"], 16) & _BIT or any(self._handles(thread) for thread in self._could_take):
            return False
        self._finish()
        return True

    def give_up(self) -> None:
        """The time is up: say what is known."""
        if self.poll():
            return
        process = self._status(str(self.stacks.pid))
        if process is not None and process["State"] == "D":
            self.stacks.note = (
                "it is in an uninterruptible system call (state D): a disk, a network file system, a driver"
            )
        else:
            self.stacks.note = f"it has not written its stacks within {ANSWER_SECONDS:g} s"
        self._finish()

    def _ask(self) -> bool:
        pid = self.stacks.pid
        process = self._status(str(pid))
        if process is None or process["State"] == "Z":
            self.stacks.note = "it has ended"
        elif process["State"] in "Tt":
            self.stacks.note = _STOPPED
        elif not int(process["SigCgt"], 16) & _BIT:
            self.stacks.note = "it is still starting"  # the signal would kill it
        else:
            try:
                self._file = _open_file(pid)
                if self._file < 0:
                    self.stacks.note = "it has closed the file for its stacks"
                    return False
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.stacks.note = "somebody else is asking it just now; ask again"
                self._close()
                return False
            except OSError as error:
                self.stacks.note = f"its files cannot be looked at: {error.strerror}"
                return False
            os.ftruncate(self._file, 0)
            self._could_take = {thread for thread in os.listdir(self._task) if not self._handles(thread)}
            os.kill(pid, STACK_SIGNAL)
            return True
        return False

    def _handles(self, thread: str) -> bool:
        """Whether a thread runs the handler, or blocks the signal for a reason of its own."""
        status = self._status(thread)
        return status is not None and bool((int(status["SigBlk"], 16) | int(status["SigPnd"], 16)) & _BIT)

    def _status(self, thread: str) -> dict[str, str] | None:
        try:
            lines = (self._task / thread / "status").read_text(errors="replace").splitlines()
        except OSError:
            return None
        return {name: value.split()[0] for name, _, value in (line.partition(":") for line in lines) if value.strip()}

    def _finish(self) -> None:
        self._done = True
        size = os.fstat(self._file).st_size
        self.stacks.threads = parse_dump(os.pread(self._file, size, 0).decode(errors="replace"))
        self._close()

    def _close(self) -> None:
        os.close(self._file)
        self._file = -1


_STOPPED = "it is stopped (SIGSTOP, or a debugger holds it): SIGCONT lets it go on"


def _open_file(pid: int) -> int:
    """Open the file that a process writes its stacks to; -1 if it has none."""
    found = -1
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            if _FILE_NAME in os.readlink(entry.path):
                # A fork has its parent's file, too; its own has the higher number.
                found = max(found, int(entry.name))
        except FileNotFoundError:
            continue
    return -1 if found < 0 else os.open(f"/proc/{pid}/fd/{found}", os.O_RDWR | os.O_CLOEXEC)


def parse_dump(text: str) -> list[Thread]:
    """Return the threads in what faulthandler wrote."""
    threads: list[Thread] = []
    for line in text.splitlines():
        if match := _THREAD.match(line):
            threads.append(Thread(int(match[1], 16), match[2] or ""))
        elif threads and (match := _FRAME.match(line)):
            number = int(match[2]) if match[2].isdecimal() else 0
            threads[-1].frames.insert(0, Frame(match[1], number, match[3]))
    return threads
