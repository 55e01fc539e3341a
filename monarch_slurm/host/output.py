"""Where lines go: to the agent's own output or to files, by a thread that alone waits for whoever does not read them.

A terminal that is stopped, a pager, or a file system that hangs must not stop the agent: it would miss its heartbeats
and lose its host. So lines are queued; when too many wait, further ones are left out and counted.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from pathlib import Path

from monarch_slurm.owned_files import append_owned, make_folders
from monarch_slurm.wire.task_limits import start_thread

MAX_WAITING_BYTES = 16 * 2**20

STDOUT, STDERR = 1, 2


class Output:
    """Writes lines to descriptors in order, on a thread of its own."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lines: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0
        self._left_out: dict[int, int] = {}
        self._busy = False
        self._dead: set[int] = set()
        start_thread(threading.Thread(target=self._run, name="output", daemon=True))

    def write(self, fd: int, line: str) -> None:
        """Queue a line for descriptor ``fd``. For any thread; never waits."""
        data = line.encode(errors="replace") + b"\n"
        with self._changed:
            if self._waiting_bytes > MAX_WAITING_BYTES:
                self._left_out[fd] = self._left_out.get(fd, 0) + 1
                return
            self._put_note(fd)
            self._put(fd, data)

    def open(self, path: Path) -> int:
        """Return a descriptor that appends to the file ``path`` (mode 0600), whose folder is made if need be."""
        make_folders(path.parent)
        return append_owned(path)

    def close(self, fd: int) -> None:
        """Close a descriptor of `open` after what is queued for it."""
        with self._changed:
            self._put_note(fd)
            self._put(fd, b"")

    def flush(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds until nothing is queued."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines and not self._busy, timeout)

    def _put_note(self, fd: int) -> None:
        count = self._left_out.pop(fd, 0)
        if count:
            self._put(fd, f"[{count} lines were left out here: nobody read them in time]\n".encode())

    def _put(self, fd: int, data: bytes) -> None:
        self._lines.append((fd, data))
        self._waiting_bytes += len(data)
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._lines:
                    for fd in list(self._left_out):
                        self._put_note(fd)
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._lines))
                self._busy = True
                fd, data = self._lines.popleft()
                self._waiting_bytes -= len(data)
                while data and self._lines and self._lines[0][0] == fd and self._lines[0][1] and len(data) < 65536:
                    more = self._lines.popleft()[1]
                    self._waiting_bytes -= len(more)
                    data += more
            if data:
                self._write(fd, data)
            else:
                os.close(fd)
                self._dead.discard(fd)

    def _write(self, fd: int, data: bytes) -> None:
        if fd in self._dead:
            return
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(fd, view) :]
        except OSError:  # its reader is gone, or the disk is full: the procs' work goes on without a log
            self._dead.add(fd)


class OutputHandler(logging.Handler):
    """Log records as lines of stderr, in order with those of the procs."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record."""
        try:
            self._output.write(STDERR, self.format(record))
        except Exception:  # logging's own rule: a record that does not format is reported, and raises nothing
            self.handleError(record)
