"""The journal of a run: one JSON object per line, on disk before anybody acts on it."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monarch_slurm.owned_files import LARGE_BYTES, append_owned, read_owned

logger = logging.getLogger(__name__)


class Journal:
    """Appends events to a file that survives the process.

    Args:
        path: the file; it is made (mode 0600) or appended to.

    Raises:
        FileRefusedError: there is something else of this name, or it is somebody else's.
        OSError: it cannot be made or opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        fd = append_owned(path)
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
    """Return the events in ``path``.

    An unfinished last line, left by a crash, is left out. So are other lines that hold no JSON object, and the log
    says how many.

    Raises:
        FileRefusedError: it cannot be read, or others may have written it.
        FileNotFoundError: there is none.
    """
    events, damaged = [], []
    for number, line in enumerate(read_owned(path, "to go on from it", limit=LARGE_BYTES).split(b"\n")[:-1], 1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict):
            events.append(event)
        else:
            damaged.append(number)
    if damaged:
        logger.warning("%s: %d lines are damaged and left out, the first is line %d", path, len(damaged), damaged[0])
    return events
