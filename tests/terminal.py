"""A terminal with a shell in it, for what people type."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import time

PROMPT = "ready> "
DEADLINE = 120.0


class Terminal:
    """Runs ``command`` in a terminal of its own; what it prints is in ``text``."""

    def __init__(self, *command: str) -> None:
        self.text = ""
        self._seen = 0
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.environ["PS1"] = PROMPT
            os.execvp(command[0], command)

    def type(self, line: str) -> None:
        os.write(self._fd, line.encode() + b"\n")

    def keys(self, text: str) -> None:
        """Type without ending the line."""
        os.write(self._fd, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        os.write(self._fd, b"\x03")

    def expect(self, pattern: str, seconds: float = DEADLINE) -> re.Match[str]:
        """Wait until what was printed since the last match has ``pattern``; return the match."""
        deadline = time.monotonic() + seconds
        while (match := re.compile(pattern).search(self.text, self._seen)) is None:
            left = deadline - time.monotonic()
            assert left > 0, f"waited {seconds:g} s in vain for {pattern!r} in:\n{self.text}"
            if self._fd in select.select([self._fd], [], [], left)[0]:
                try:
                    self.text += os.read(self._fd, 4096).decode(errors="replace").replace("\r", "")
                except OSError:  # the other end was closed
                    raise AssertionError(f"ended without {pattern!r}:\n{self.text}") from None
        self._seen = match.end()
        return match

    def interrupt_until(self, pattern: str, seconds: float = DEADLINE) -> None:
        """Press Ctrl-C until `expect` finds ``pattern``: one that comes just before Python waits for a key is seen with
        the next key only.
        """
        deadline = time.monotonic() + seconds
        while True:
            self.interrupt()
            try:
                self.expect(pattern, 5)
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
            else:
                return

    def interrupt_impatiently(self, seconds: float = DEADLINE) -> int:
        """Press Ctrl-C three times; return the exit code of the command once it has ended."""
        deadline = time.monotonic() + seconds
        pressed, left = 0.0, 3
        while True:
            try:
                if left and time.monotonic() - pressed > 0.3:
                    self.interrupt()
                    pressed, left = time.monotonic(), left - 1
                if self._fd in select.select([self._fd], [], [], 0.1)[0]:
                    self.text += os.read(self._fd, 4096).decode(errors="replace").replace("\r", "")
            except OSError:  # the other end was closed
                os.close(self._fd)
                return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            assert time.monotonic() < deadline, f"has not ended after {seconds:g} s:\n{self.text}"

    def close(self) -> None:
        """Close the terminal, as by closing its window, and wait for the shell's end."""
        os.close(self._fd)
        deadline = time.monotonic() + 20
        while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.02)

    def close_quietly(self) -> None:
        """Close the terminal if it is open, and end what runs there."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.close()
