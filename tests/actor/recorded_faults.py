"""A fault hook that records."""

from __future__ import annotations

import threading

from support import DEADLINE

from monarch_slurm.actor import MeshFailure


class Faults:
    """The failures that reached the root."""

    def __init__(self) -> None:
        self.failures: list[MeshFailure] = []
        self._changed = threading.Condition()

    def __call__(self, failure: MeshFailure) -> None:
        with self._changed:
            self.failures.append(failure)
            self._changed.notify_all()

    def wait(self, count: int = 1) -> list[MeshFailure]:
        with self._changed:
            came = self._changed.wait_for(lambda: len(self.failures) >= count, DEADLINE)
        assert came, f"{len(self.failures)} of {count} failures came: {self.failures}"
        return list(self.failures)
