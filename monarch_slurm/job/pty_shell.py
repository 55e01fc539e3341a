"""The process that becomes a shell on a pty: a session of its own with the pty as its terminal.

It does so itself, since its parent has threads and must not fork by hand.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import termios
from typing import NoReturn


def main() -> NoReturn:
    """Become the program that the arguments name, with standard input as its terminal."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # procs ignore Ctrl-C, and what they start would, too
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - the user's own shell
