"""What procs print: whole lines, prefixed or in files, with the end of stderr kept."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from monarch_slurm.host.output import STDERR, STDOUT, Output
from monarch_slurm.owned_files import FileRefusedError

_READ_BYTES = 64 * 1024
_MAX_LINE_BYTES = 64 * 1024
_READS_IN_A_ROW = 16
"""A proc that prints without end gets the loop's attention for no longer than this."""


class LineReader:
    """Reads a pipe without blocking and hands on whole lines.

    Args:
        fd: the read end; the reader owns it.
        on_line: called with each line, undecodable bytes replaced, without its newline.
    """

    def __init__(self, fd: int, on_line: Callable[[str], None]) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._on_line = on_line
        self._rest = b""
        self.ended = False

    def read(self) -> bool:
        """Take what is there now, up to a limit; False once every writer has closed the pipe."""
        for _ in range(_READS_IN_A_ROW):
            try:
                data = os.read(self.fd, _READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._hand_on(line)
            if len(self._rest) > _MAX_LINE_BYTES:
                self._hand_on(self._rest)
                self._rest = b""
        return True

    def finish(self) -> None:
        """Hand on what is left, the last, unfinished line too, and close the pipe."""
        if not self.ended:
            self.read()
            self.ended = True
            if self._rest:
                self._hand_on(self._rest)
            os.close(self.fd)

    def _hand_on(self, line: bytes) -> None:
        self._on_line(line.decode(errors="replace").rstrip("\r"))


class ProcLog:
    """Where the lines of one proc go.

    Args:
        prefix: put before each line on the agent's own output.
        path: a file that gets the lines instead, unprefixed; None for the agent's output.
        tail_lines: lines of stderr that `tail` returns.
        taken: called with the stream (1 or 2) and each line first; true means that it need not be printed here.
    """

    def __init__(
        self,
        output: Output,
        prefix: str,
        path: Path | None,
        tail_lines: int,
        taken: Callable[[int, str], bool] = lambda stream, line: False,
    ) -> None:
        self._taken = taken
        self._output = output
        self._prefix = prefix
        self._tail: deque[str] = deque(maxlen=tail_lines)
        self._file: int | None = None
        if path is not None:
            try:
                self._file = output.open(path)
            except (OSError, FileRefusedError) as error:
                output.write(STDERR, f"{prefix} cannot write the log {path} ({error}): its lines are printed here")

    @property
    def tail(self) -> list[str]:
        """The last lines of stderr."""
        return list(self._tail)

    def stdout(self, line: str) -> None:
        """Take a line of stdout."""
        self._write(STDOUT, line)

    def stderr(self, line: str) -> None:
        """Take a line of stderr."""
        self._tail.append(line)
        self._write(STDERR, line)

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._file is not None:
            self._output.close(self._file)
            self._file = None

    def _write(self, stream: int, line: str) -> None:
        printed_elsewhere = self._taken(stream, line)
        if self._file is not None:
            self._output.write(self._file, line)
        elif not printed_elsewhere:
            self._output.write(stream, f"{self._prefix} {line}")
