"""Ctrl-C while something ends."""

from __future__ import annotations

import signal
import threading


def ignore_interrupts() -> None:
    """Ignore further interrupts, and one that comes meanwhile. Does nothing on other threads, which none comes to."""
    if threading.current_thread() is not threading.main_thread():
        return
    while True:
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        except KeyboardInterrupt:  # one that came before
            continue
        return
