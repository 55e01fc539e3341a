"""What was transferred how: counts for ever, the last transfers one by one."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

_KEPT = 256


@dataclass(frozen=True)
class TransferCount:
    """Transfers by one backend in this process since its start: buffers, bytes, and batches that failed."""

    buffers: int = 0
    nbytes: int = 0
    failures: int = 0


@dataclass(frozen=True)
class TransferRecord:
    """One batch of transfers with one process.

    Attributes:
        owner: the process that owns the buffers.
        backend: what carried it: ``local``, ``shm``, ``process_vm``, ``ibverbs`` or ``tcp``.
        buffers: how many buffers were read or written.
        nbytes: bytes in all.
        seconds: how long it took, without the time that it waited for a thread.
        error: what went wrong, or None.
    """

    owner: str
    backend: str
    buffers: int
    nbytes: int
    seconds: float
    error: str | None


class Records:
    """The book of this process. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, TransferCount] = {}
        self._last: deque[TransferRecord] = deque(maxlen=_KEPT)

    def add(self, record: TransferRecord) -> None:
        """Enter one batch."""
        with self._lock:
            old = self._counts.get(record.backend, TransferCount())
            if record.error is None:
                new = TransferCount(old.buffers + record.buffers, old.nbytes + record.nbytes, old.failures)
            else:
                new = TransferCount(old.buffers, old.nbytes, old.failures + 1)
            self._counts[record.backend] = new
            self._last.append(record)

    def counts(self) -> dict[str, TransferCount]:
        """Return the counts by backend."""
        with self._lock:
            return dict(self._counts)

    def last(self) -> list[TransferRecord]:
        """Return the last batches, the newest last."""
        with self._lock:
            return list(self._last)


records = Records()


def transfer_counts() -> dict[str, TransferCount]:
    """Return how much each backend has carried in this process since its start."""
    return records.counts()


def recent_transfers() -> list[TransferRecord]:
    """Return the last 256 batches of transfers of this process, the newest last."""
    return records.last()
