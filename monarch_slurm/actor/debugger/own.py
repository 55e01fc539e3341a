"""Debuggers of a program's own, which read and write through `DebugController` in place of ``breakpoint()``."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from monarch_slurm.actor.debugger.desk import DebugDesk
from monarch_slurm.actor.debugger.hook import MAX_HELD_CHARACTERS
from monarch_slurm.wire import CONTROLLER, Address, Message


@dataclass(frozen=True)
class DebuggerWrite:
    """Text that passes between a debugger and whoever sits at it, and the place in the program that it is about."""

    payload: bytes
    function: str | None
    lineno: int | None


class OwnSession:
    """One of them, which the desk takes for any other stopped rank. On the event loop of the controller.

    Args:
        desk: what it is listed at.
        actor: name of what is debugged, with its ``rank``, coordinates and host.
    """

    def __init__(self, desk: DebugDesk, actor: str, rank: int, coords: dict[str, int], host: str) -> None:
        self._desk = desk
        self._process = Address(host, f"debugger of {actor} {rank}")
        self._who = {"actor": actor, "mesh": actor, "rank": rank, "coords": coords, "host": host, "pid": 0}
        self._where: tuple[str, int] = ("?", 0)
        self._loop = asyncio.get_running_loop()
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._rest = b""
        self._text = ""
        desk.connect(self._process, self._take)
        self._tell("stopped")

    def write(self, write: DebuggerWrite) -> None:
        """Show what the debugger says, when it reads next or has said much: a prompt is not shown before it reads."""
        if write.function is not None:
            self._where = write.function, write.lineno or 0
        self._text += write.payload.decode(errors="replace")
        if len(self._text) > MAX_HELD_CHARACTERS:
            self._tell("output")

    async def read(self, size: int) -> DebuggerWrite | str:
        """Return up to ``size`` bytes of what the person has typed; ``"detach"`` once the session is over."""
        if not self._rest:
            self._tell("stopped")
            self._tell("prompt")
            line = await self._lines.get()
            if line is None:
                self._lines.put_nowait(None)
                return "detach"
            self._rest = line
        taken, self._rest = self._rest[:size], self._rest[size:]
        return DebuggerWrite(taken, None, None)

    def end(self) -> None:
        """The debugger is through; one that reads is told."""
        self._tell("left")
        self._desk.disconnect(self._process)
        self._lines.put_nowait(None)

    def _take(self, fields: dict[str, Any]) -> None:
        if "line" in fields:
            self._loop.call_soon_threadsafe(self._lines.put_nowait, fields["line"].encode())

    def _tell(self, news: str) -> None:
        text, self._text = ("", self._text) if news == "stopped" else (self._text, "")
        fields: dict[str, Any] = {"news": news, "session": 0, "text": text}
        if news == "stopped":
            function, line = self._where
            fields |= {**self._who, "function": function, "file": "", "line": line, "missing": []}
        self._desk.take(Message("debug", CONTROLLER, self._process, fields))
