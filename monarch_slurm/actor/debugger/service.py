"""The debugger for other terminals (``monarch-slurm debug``), through the program's console."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from monarch_slurm.actor.debugger.desk import DebugDesk
from monarch_slurm.actor.debugger.shell import DebugShell, EndOfInput, HangUp, Interrupt
from monarch_slurm.wire.console import ConsoleError, Session
from monarch_slurm.wire.task_limits import start_thread

MAX_LINE = 2**20


def serve_debugger(desk: DebugDesk, session: Session) -> None:
    """Serve one terminal until it hangs up, leaves, or another one takes over.

    It is sent ``{"text": ..., "prompt": ...}``, and sends ``{"line": ...}``, ``{"interrupt": True}`` or
    ``{"end": True}``.
    """
    shell = DebugShell(desk, lambda text, prompt: session.send({"text": text, "prompt": prompt}))

    def listen() -> None:
        with contextlib.suppress(OSError, ConsoleError):
            while (packet := session.receive()) is not None:
                shell.events.put(_event(packet))
        shell.events.put(HangUp())

    start_thread(threading.Thread(target=listen, name="monarch-debug-terminal", daemon=True))
    shell.run()
    session.send({"text": "", "prompt": "", "over": True})


def _event(packet: dict[str, Any]) -> Any:
    if packet.get("interrupt"):
        return Interrupt()
    return EndOfInput() if packet.get("end") else str(packet.get("line", ""))[:MAX_LINE]
