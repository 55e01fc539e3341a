"""Lines of procs on the client: printed by a thread that alone waits for whoever does not read them."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from monarch_slurm.actor.similar_lines import STDERR, STDOUT, SimilarLines
from monarch_slurm.wire import Message, unpack
from monarch_slurm.wire.task_limits import start_thread

MAX_KEPT_BYTES = 4 * 2**20
"""A window ends early when its lines have this length."""


@dataclass
class _Window:
    seconds: float
    ends: float
    lines: SimilarLines


class LogPrinter:
    """Prints what agents stream. Its thread starts with the first line.

    Args:
        send: sends a message to an agent.
        with_rank: whether lines are prefixed with host, mesh and rank.
    """

    def __init__(self, send: Callable[[Message], None], with_rank: Callable[[], bool]) -> None:
        self._send = send
        self._with_rank = with_rank
        self._queue: queue.SimpleQueue[Message | threading.Event] = queue.SimpleQueue()
        self._windows: dict[str, _Window] = {}
        self._thread: threading.Thread | None = None

    def take(self, message: Message) -> bool:
        """Take a message about lines; False if it is of another kind. On the I/O thread."""
        if message.kind != "log":
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="monarch-logs", daemon=True)
            start_thread(self._thread)
        self._queue.put(message)
        return True

    def flush(self, timeout: float | None = None) -> None:
        """Print all that has come, windows that have not ended, too; wait for it ``timeout`` seconds at most."""
        if self._thread is not None:
            printed = threading.Event()
            self._queue.put(printed)
            printed.wait(timeout)

    def _run(self) -> None:
        while True:
            item = None
            with contextlib.suppress(queue.Empty):
                ends = min((window.ends for window in self._windows.values()), default=None)
                item = self._queue.get(timeout=None if ends is None else max(0.0, ends - time.monotonic()))
            if isinstance(item, threading.Event):
                self._end_windows(float("inf"))
                item.set()
            elif item is None:
                self._end_windows(time.monotonic())
            else:
                self._print_batch(item)
                self._end_windows(time.monotonic())

    def _set_window(self, mesh: str, seconds: float | None) -> None:
        window = self._windows.get(mesh)
        if (window.seconds if window else None) == (seconds or None):
            return
        self._end_window(self._windows.pop(mesh, None))
        if seconds:
            self._windows[mesh] = _Window(seconds, time.monotonic() + seconds, SimilarLines())

    def _print_batch(self, message: Message) -> None:
        fields = message.fields
        host = fields["host"]
        texts: list[tuple[int, str]] = []
        for mesh, seconds in fields["windows"].items():
            self._set_window(mesh, seconds)
        for mesh, rank, stream, line in unpack(message.body[0]):
            window = self._windows.get(mesh)
            prefix = f"[{host} {mesh} {rank}] " if self._with_rank() else ""
            if window is None:
                texts.append((stream, prefix + line))
            else:
                window.lines.add(rank, stream, line, prefix)
                if window.lines.bytes > MAX_KEPT_BYTES:
                    self._end_window(window)
        if fields["left_out"]:
            texts.append(
                (STDERR, f"[{fields['left_out']} lines of host {host} were left out here: nobody read them in time]")
            )
        _write(texts)
        self._send(Message("log_ack", message.src, message.dst, {"bytes": fields["bytes"]}))

    def _end_windows(self, now: float) -> None:
        for window in self._windows.values():
            if window.ends <= now:
                self._end_window(window)

    def _end_window(self, window: _Window | None) -> None:
        if window is not None:
            _write(window.lines.take_all())
            window.ends = time.monotonic() + window.seconds


def _write(lines: list[tuple[int, str]]) -> None:
    for number, stream in ((STDOUT, sys.stdout), (STDERR, sys.stderr)):
        text = "".join(f"{line}\n" for which, line in lines if which == number)
        if text:
            try:
                stream.write(text)
                stream.flush()
            except (OSError, ValueError, AttributeError):  # closed, its reader is gone, or there is none
                continue


def flush_after_each_cell(flush: Callable[[], Any]) -> None:
    """In a notebook or IPython, call ``flush`` after each cell, so that its lines appear below it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and flush not in shell.events.callbacks.get("post_run_cell", []):
        shell.events.register("post_run_cell", flush)
