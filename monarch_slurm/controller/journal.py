"""The journal of a run: one JSON object per line, on disk before anybody acts on it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Journal:
    """Appends events to a file that survives the process.

    Args:
        path: the file; it is made (mode 0600) or appended to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._file = os.fdopen(fd, "w", buffering=1, encoding="utf-8")  # a line leaves when it is whole
        self._lock = threading.Lock()

    def write(self, event: Mapping[str, Any], sync: bool = False) -> None:
        """Append ``event``. For any thread.

        Args:
            sync: it must be on the disk when this returns, not just with the operating system.
        """
        line = json.dumps(event, default=str) + "\n"
        with self._lock:
            self._file.write(line)
            if sync:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return the events in ``path``; an unfinished last line, left by a crash, is left out."""
    events = []
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        events.append(json.loads(line))
    return events
