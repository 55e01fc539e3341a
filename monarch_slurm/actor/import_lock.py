"""One import at a time in a process whose actors import on many threads.

Python locks each module by itself. Two threads that import parts of one large package come to wait for each other; the
import system notices that, lets one of them go on, and that one sees modules that are not complete (``KeyError:
'torch'``, "partially initialized module"). Whatever imports is covered: unpickling of classes and arguments,
``__init__``, imports inside of functions. Modules that are loaded already take no lock.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

logger = logging.getLogger(__name__)

STALLED_SECONDS = 30.0
"""After so long without a new module, an import is not waited for: its module may itself wait for another thread."""

_LOOK_SECONDS = 1.0


class _Lock(Protocol):
    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...
    def release(self) -> None: ...


class _Turns:
    """Has the lock, a new one in a forked process: another thread may have had that of the parent."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self.lock: _Lock = threading.RLock()


_turns = _Turns()


def install() -> None:
    """Import on one thread at a time from here on, in this process."""
    system: Any = importlib._bootstrap
    original: Callable[[str, Any], Any] = system._find_and_load

    def _find_and_load(name: str, import_: Any) -> Any:
        lock = _turns.lock
        turn = lock.acquire(blocking=False) or _wait_for_turn(lock, name)
        try:
            return original(name, import_)
        finally:
            if turn:
                lock.release()

    # Python leaves the frames of its import system out of tracebacks. It knows them by the name of their file.
    _find_and_load.__code__ = _find_and_load.__code__.replace(co_filename=original.__code__.co_filename)
    system._find_and_load = _find_and_load


def _wait_for_turn(lock: _Lock, name: str) -> bool:
    """Return whether this thread has the lock; False if the thread that has it does not get on."""
    modules, since = len(sys.modules), time.monotonic()
    while not lock.acquire(timeout=_LOOK_SECONDS):
        if len(sys.modules) != modules:
            modules, since = len(sys.modules), time.monotonic()
        elif time.monotonic() - since > STALLED_SECONDS:
            logger.warning(
                "another thread has imported nothing new for %g s; the import of %s goes on beside it",
                STALLED_SECONDS, name,
            )  # fmt: skip
            return False
    return True
