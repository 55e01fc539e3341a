"""An operation that has been started."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from monarch_slurm.collectives.errors import CollectiveError


class Work:
    """What every operation returns. Only the host waits with it: on a GPU the stream orders what follows by itself."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Block this thread until the operation is through.

        Raises:
            TimeoutError: it is not through after ``timeout_s`` seconds; it goes on.
            PeerLostError: the communicator was aborted meanwhile.
            CollectiveError: the operation failed.
        """
        raise NotImplementedError

    def is_completed(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        raise NotImplementedError


class HostWork(Work):
    """An operation of a worker thread, which calls `finish` once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def finish(self, error: BaseException | None = None) -> None:
        """Let every waiter go; the first call counts."""
        with self._lock:
            if not self._done.is_set():
                self._error = error
                self._done.set()

    def wait(self, timeout_s: float | None = None) -> None:  # noqa: D102 - inherited
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"{self._name} is not through after {timeout_s} s")
        if self._error is not None:
            if isinstance(self._error, CollectiveError):
                raise self._error
            raise CollectiveError(f"{self._name} failed: {self._error}") from self._error

    def is_completed(self) -> bool:  # noqa: D102 - inherited
        return self._done.is_set()


class DeviceWork(Work):
    """An operation on the current stream of a GPU. ``failure`` returns the abort's error, if any."""

    def __init__(self, name: str, stream: Any, failure: Callable[[], BaseException | None]) -> None:
        self._name = name
        self._event = stream.record_event()
        self._failure = failure

    def wait(self, timeout_s: float | None = None) -> None:  # noqa: D102 - inherited
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause_s = 20e-6
        while not self._event.query():
            self._raise_failure()
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self._name} is not through after {timeout_s} s")
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 2e-3)
        self._raise_failure()  # an aborted operation ends too, with whatever its buffers hold

    def is_completed(self) -> bool:  # noqa: D102 - inherited
        return bool(self._event.query()) or self._failure() is not None

    def _raise_failure(self) -> None:
        failure = self._failure()
        if failure is not None:
            raise failure
