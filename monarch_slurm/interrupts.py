"""Ctrl-C while something ends."""

from __future__ import annotations

import signal


def ignore_interrupts() -> None:
    """Ignore further interrupts, and one that comes meanwhile. In the main thread."""
    while True:
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        except KeyboardInterrupt:  # one that came before
            continue
        return
