"""The stopped ranks of a program, kept in the program itself, and what is said between them and whoever debugs."""

from __future__ import annotations

import linecache
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from monarch_slurm.host.exits import HostDown, ProcDown
from monarch_slurm.wire import CONTROLLER, Address, Message

MAX_TEXT = 2**22
"""Characters that are kept of what a rank says while nobody is attached to it."""

MAX_SOURCES = 2**21
"""Characters of the source files that a rank gets for one stop; the longest are left out."""


@dataclass(eq=False)
class StoppedRank:
    """One thread that is, or was, under the debugger. ``ended`` says why it is not any more."""

    process: Address
    session: int
    actor: str
    mesh: str
    rank: int
    coords: dict[str, int]
    host: str
    pid: int
    function: str
    file: str
    line: int
    waits: bool = False
    stops: int = 0
    ended: str = ""
    texts: list[str] = field(default_factory=list)

    @property
    def where(self) -> str:
        """The place in the program."""
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def title(self) -> str:
        """What people call it."""
        return f"rank {self.rank} of {self.actor}"


class Taken:
    """The event of a debugger that another one has taken over from."""


Event = StoppedRank | Taken | Any
Events = queue.SimpleQueue[Event]


class DebugDesk:
    """Keeps them; at most one debugger at a time hears of their changes, the last that came.

    Args:
        send: sends a message to a process.
        on_first: called with the first stop of the program. On the I/O thread.
    """

    def __init__(self, send: Callable[[Message], None], on_first: Callable[[], None]) -> None:
        self._send = send
        self._on_first: Callable[[], None] | None = on_first
        self._ranks: dict[tuple[Address, int], StoppedRank] = {}
        self._events: Events | None = None
        self._inputs: dict[Address, Callable[[dict[str, Any]], None]] = {}
        self.changed = threading.Condition()
        self.stops = 0
        """How often a rank has stopped."""

    # ---- on the I/O thread

    def take(self, message: Message) -> bool:
        """Take what a rank says of itself; False for another kind of message. Looks at the ends of processes, too."""
        kind = message.kind
        if kind == "debug":
            self._take_news(message)
            return True
        if kind == "proc_down":
            proc_down = ProcDown(**message.fields)
            self._gone(lambda process: process == proc_down.address, f"has ended: {proc_down.exit}")
        elif kind == "host_down":
            host_down = HostDown(**message.fields)
            self._gone(lambda process: process.host == host_down.host, f"is gone: {host_down.describe()}")
        elif kind == "procs_restart":
            down = message.fields["down"]
            names = {f"{down['mesh']}.{rank}" for rank in message.fields["ranks"]}
            self._gone(lambda process: process.proc in names, "has been started again by its restart policy")
        return False

    def _take_news(self, message: Message) -> None:
        fields = dict(message.fields)
        news, session, text = fields.pop("news"), fields.pop("session"), fields.pop("text")
        key = message.src, session
        with self.changed:
            rank = self._ranks.get(key)
            if news == "stopped":
                missing = fields.pop("missing")
                if rank is None:
                    rank = self._ranks[key] = StoppedRank(message.src, session, **fields)
                rank.function, rank.file, rank.line = fields["function"], fields["file"], fields["line"]
                rank.stops += 1
                self.stops += 1
                if missing:
                    self._send_sources(rank, missing)
            if rank is None:
                return
            if text:
                rank.texts.append(text)
                while sum(map(len, rank.texts)) > MAX_TEXT and len(rank.texts) > 1:
                    del rank.texts[0]
            rank.waits = news == "prompt"
            if news == "left":
                rank.ended = "goes on"
                del self._ranks[key]
            self._tell(rank)
        if news == "stopped" and self._on_first is not None:
            begin, self._on_first = self._on_first, None
            begin()

    def _send_sources(self, rank: StoppedRank, files: list[str]) -> None:
        """Send source files that the rank's machine lacks: of functions that came from here."""
        sources = {file: "".join(linecache.getlines(file)) for file in files if file.endswith(".py") or file[:1] == "<"}
        known: dict[str, str] = {}
        for file, text in sorted(sources.items(), key=lambda item: len(item[1])):
            if text and sum(map(len, known.values())) + len(text) <= MAX_SOURCES:
                known[file] = text
        self._send(Message("debug_input", rank.process, CONTROLLER, {"session": rank.session, "sources": known}))

    def _gone(self, is_gone: Callable[[Address], bool], why: str) -> None:
        with self.changed:
            for key, rank in list(self._ranks.items()):
                if is_gone(rank.process):
                    del self._ranks[key]
                    rank.waits, rank.ended = False, why
                    self._tell(rank)

    def _tell(self, rank: StoppedRank) -> None:
        if self._events is not None:
            self._events.put(rank)
        self.changed.notify_all()

    # ---- for debuggers, on any thread

    def stopped(self) -> list[StoppedRank]:
        """Return the ranks that wait for the debugger, in order."""
        with self.changed:
            waiting = [rank for rank in self._ranks.values() if rank.waits]
        return sorted(waiting, key=lambda rank: (rank.actor, rank.mesh, rank.rank))

    def write(self, rank: StoppedRank, line: str) -> bool:
        """Send a line to a rank; False if it does not wait for one."""
        with self.changed:
            if not rank.waits:
                return False
            rank.waits = False
        fields = {"session": rank.session, "line": f"{line}\n"}
        take = self._inputs.get(rank.process)
        if take is not None:
            take(fields)
        else:
            self._send(Message("debug_input", rank.process, CONTROLLER, fields))
        return True

    def connect(self, process: Address, take: Callable[[dict[str, Any]], None]) -> None:
        """Call ``take`` with what would be sent to ``process``, which is none."""
        self._inputs[process] = take

    def disconnect(self, process: Address) -> None:
        """Take `connect` back."""
        self._inputs.pop(process, None)

    def take_text(self, rank: StoppedRank) -> str:
        """Return what a rank has said since the last time."""
        with self.changed:
            text = "".join(rank.texts)
            rank.texts.clear()
        return text

    def open(self, events: Events) -> None:
        """Have the changes put into ``events``; who had them until now gets `Taken`."""
        with self.changed:
            if self._events is not None:
                self._events.put(Taken())
            self._events = events
            self.changed.notify_all()

    def close(self, events: Events) -> None:
        """Take `open` back, if it still holds."""
        with self.changed:
            if self._events is events:
                self._events = None
            self.changed.notify_all()

    @property
    def is_open(self) -> bool:
        """Whether there is a debugger."""
        return self._events is not None
