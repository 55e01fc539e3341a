"""Writing a trainer's state on another thread while the trainer continues, one state at a time."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from monarch_slurm.train import state
from monarch_slurm.train.saved import SavedStateError, remove_file, state_path, write_snapshot
from monarch_slurm.wire.task_limits import start_thread


class StateWriter:
    """Writes the states of one rank of one replica. For the trainer's thread, but for `discard`."""

    def __init__(self, replica: int, rank: int) -> None:
        self._replica, self._rank = replica, rank
        self._lock = threading.Lock()
        self._writing: int | None = None
        self._discarded: set[int] = set()
        self._thread: threading.Thread | None = None
        self._told: dict[str, Any] = {}
        self.step = -1
        """Of the newest state that was begun to be written."""

    @property
    def busy(self) -> bool:
        """Whether a state is being written."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, folder: Path, step: int, tree: Any) -> None:
        """Copy ``tree``, and begin to write it into the run's ``folder``. Nothing else may be being written."""
        path = state_path(folder, step, self._replica, self._rank)
        arguments = (path, step, state.snapshot(tree), time.time())
        self.step = step
        with self._lock:
            self._writing = step
        self._thread = threading.Thread(target=self._write, args=arguments, name="monarch-save", daemon=True)
        start_thread(self._thread)

    def take(self, wait: bool = False) -> dict[str, Any] | None:
        """Return what a ``saved`` event is to say of a state that has been written since the last call, if one has.

        Args:
            wait: return only when nothing is being written any more.
        """
        if self._thread is None or (not wait and self._thread.is_alive()):
            return None
        self._thread.join()
        self._thread = None
        return self._told

    def discard(self, folder: Path, step: int) -> None:
        """Remove this rank's file of ``step``, now or as soon as it is written: another rank failed to save that step.

        For any thread.
        """
        with self._lock:
            self._discarded.add(step)
            if self._writing == step:
                return
        remove_file(state_path(folder, step, self._replica, self._rank))

    def _write(self, path: Path, step: int, copy: Any, began: float) -> None:
        try:
            sha256, size = write_snapshot(path, copy)
            self._told = {"step": step, "sha256": sha256, "bytes": size}
        except SavedStateError as error:  # the run itself can go on, and another replica may fare better
            self._told = {"step": step, "error": str(error)}
        with self._lock:
            self._writing = None
            discarded = step in self._discarded
            self._discarded = {other for other in self._discarded if other > step}
        if discarded:
            remove_file(path)
        self._told["seconds"] = time.time() - began
