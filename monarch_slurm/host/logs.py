"""What procs print: whole lines, prefixed or in files, with the end of stderr kept."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

_READ_BYTES = 64 * 1024
_MAX_LINE_BYTES = 64 * 1024


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
        """Take what is there now; False once every writer has closed the pipe."""
        while True:
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

    def finish(self) -> None:
        """Hand on the last, unfinished line and close the pipe."""
        if not self.ended:
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
    """

    def __init__(self, prefix: str, path: Path | None, tail_lines: int) -> None:
        self._prefix = prefix
        self._tail: deque[str] = deque(maxlen=tail_lines)
        self._file: BinaryIO | None = None
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the proc

    @property
    def tail(self) -> list[str]:
        """The last lines of stderr."""
        return list(self._tail)

    def stdout(self, line: str) -> None:
        """Take a line of stdout."""
        self._write(line, sys.stdout)

    def stderr(self, line: str) -> None:
        """Take a line of stderr."""
        self._tail.append(line)
        self._write(line, sys.stderr)

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: str, stream: object) -> None:
        if self._file is not None:
            self._file.write(line.encode(errors="replace") + b"\n")
        else:
            print(f"{self._prefix} {line}", file=stream, flush=True)  # type: ignore[call-overload]
