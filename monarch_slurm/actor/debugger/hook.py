"""What ``breakpoint()`` does in a process with actors: the rank stops, and whoever debugs the program talks to it.

The thread that stops waits for lines of the debugger; the I/O thread goes on, and the host sees that it lives.
"""

from __future__ import annotations

import linecache
import os
import pdb
import queue
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from monarch_slurm.actor.context import current_instance
from monarch_slurm.actor.debugger.rank_pdb import RankPdb
from monarch_slurm.wire import CONTROLLER, Message

if TYPE_CHECKING:
    from monarch_slurm.actor.runtime import Runtime

MAX_HELD_CHARACTERS = 32 * 1024
"""Output beyond this is sent before the next prompt."""

MAX_CHARACTERS = 2**20
"""Of what is printed at once no more is shown."""

_here = threading.local()


def call_ended(error: BaseException | None = None) -> None:
    """A call is over on this thread, and so is its debugger, if it had one; for an error it stops once more."""
    debugger: RankPdb | None = getattr(_here, "debugger", None)
    if debugger is not None:
        _here.debugger = None
        debugger.finish(error)


class Debugging:
    """The debugger sessions of one process.

    Args:
        pump: handles messages until a condition holds; for code that stops on the I/O thread itself.
    """

    def __init__(self, runtime: Runtime, pump: Callable[[Callable[[], bool]], None] | None = None) -> None:
        self._runtime = runtime
        self._pump = pump
        self._io_thread = threading.get_ident()
        self._sessions: dict[int, DebugSession] = {}
        self._lock = threading.Lock()
        self._count = 0
        self._released = False

    def install(self) -> None:
        """Take ``breakpoint()`` over, unless somebody else has, or the environment says what it does."""
        if sys.breakpointhook is sys.__breakpointhook__ and not os.environ.get("PYTHONBREAKPOINT"):
            sys.breakpointhook = self._stop

    def feed(self, message: Message) -> None:
        """Take what the debugger sends to a session of this process. On the I/O thread."""
        session = self._sessions.get(message.fields["session"])
        if session is not None:
            session.inbox.put(message.fields)

    def release(self) -> None:
        """The process is to end: whatever waits for the debugger waits no longer, and its call is given up."""
        with self._lock:
            self._released = True
            sessions = list(self._sessions.values())
        for session in sessions:
            session.inbox.put({"line": ""})

    def _stop(self, *_: object, header: str | None = None, **__: object) -> None:
        frame = sys._getframe(1)
        instance = current_instance()
        if self._pump is None and (instance is None or instance.creator is None):
            _stop_in_terminal(frame, header)  # the program's own code, which has the terminal
            return
        debugger: RankPdb | None = getattr(_here, "debugger", None)
        if debugger is None:
            debugger = _here.debugger = RankPdb(self._open())
        if header is not None:
            debugger.message(header)
        debugger.stop_at(frame)

    def _open(self) -> DebugSession:
        with self._lock:
            self._count += 1
            session = self._sessions[self._count] = DebugSession(self, self._count, self._who())
            if self._released:
                session.inbox.put({"line": ""})
        return session

    def close(self, session: DebugSession) -> None:
        """Forget a session that is over."""
        with self._lock:
            self._sessions.pop(session.number, None)

    def send(self, fields: dict[str, Any]) -> None:
        """Tell the debugger something."""
        self._runtime.send(Message("debug", CONTROLLER, self._runtime.address, fields))

    def wait_for(self, inbox: queue.SimpleQueue[dict[str, Any]]) -> dict[str, Any]:
        """Return the next item."""
        if self._pump is not None and threading.get_ident() == self._io_thread:
            self._pump(lambda: not inbox.empty())
        return inbox.get()

    def _who(self) -> dict[str, Any]:
        """Return what the stopped rank is called: an actor, or the proc itself outside of any."""
        instance = current_instance()
        if instance is not None and instance.ref is not None:
            name, mesh, point = instance.name, instance.ref.mesh, instance.rank
        else:
            assert self._runtime.home is not None
            layout, shape, rank = self._runtime.home
            name, mesh, point = layout.mesh, layout.mesh, shape.point(rank)
        return {
            "actor": name,
            "mesh": mesh,
            "rank": point.rank,
            "coords": dict(point),
            "host": self._runtime.host_name,
            "pid": os.getpid(),
        }


class DebugSession:
    """The way between a thread that is debugged and the debugger: files for pdb, and the news of where it is."""

    def __init__(self, debugging: Debugging, number: int, who: dict[str, Any]) -> None:
        self.number = number
        self.inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._debugging = debugging
        self._who = who
        self._text = ""

    # ---- what pdb takes for its files

    def write(self, text: str) -> int:
        """Hold text until the next prompt."""
        if len(text) > MAX_CHARACTERS:
            text = f"{text[:MAX_CHARACTERS]}\n[{len(text) - MAX_CHARACTERS} more characters are left out]\n"
        self._text += text
        if len(self._text) > MAX_HELD_CHARACTERS:
            self._send("output")
        return len(text)

    def flush(self) -> None:
        """Do nothing: a prompt sends what is held."""

    def readline(self, *_: object) -> str:
        """Return the debugger's next line; an empty text once there is no debugger any more."""
        self._send("prompt")
        line: str = self._debugging.wait_for(self.inbox)["line"]
        return line

    # ---- news

    def stopped(self, frame: FrameType, files: set[str]) -> None:
        """Tell where the thread is now.

        Args:
            files: those of all frames; the source of those that this machine lacks is got from the program.
        """
        missing = [file for file in files if not linecache.getlines(file)]
        where = {"function": frame.f_code.co_name, "file": frame.f_code.co_filename, "line": frame.f_lineno}
        self._send("stopped", **self._who, **where, missing=missing)
        if missing:
            answer = self._debugging.wait_for(self.inbox)
            if "sources" not in answer:
                self.inbox.put(answer)  # the process ends
            for file, text in answer.get("sources", {}).items():
                linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file

    def resumed(self, over: bool) -> None:
        """Tell that the thread runs; ``over``: and does not stop again by itself."""
        self._send("left" if over else "running")

    def close(self) -> None:
        """End the session."""
        self._debugging.close(self)

    def _send(self, news: str, **fields: Any) -> None:
        text, self._text = self._text, ""
        self._debugging.send({"news": news, "session": self.number, "text": text, **fields})


def _stop_in_terminal(frame: FrameType, header: str | None) -> None:
    debugger = pdb.Pdb()
    if header is not None:
        debugger.message(header)
    debugger.set_trace(frame)
