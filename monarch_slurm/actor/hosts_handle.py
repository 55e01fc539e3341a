"""What one `HostMesh` shares with its slices and pickled copies, and not with other meshes of the same hosts."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence

_lock = threading.RLock()
_by_key: weakref.WeakValueDictionary[str, HostsHandle] = weakref.WeakValueDictionary()


class HostsHandle:
    """One way in which this program got hosts: by one call of ``state()`` or `attach_to_workers`.

    Procs remember the handle of the mesh that they were spawned through, so that ``stop()`` ends these procs only.

    Args:
        key: the same in each process that has a copy of the mesh; None makes a new one.
        same_hosts: a handle of the same hosts: when the hosts are shut down through one of both, both know it.
        release: for workers: called when the mesh ends, with whether its hosts are shut down; returns which of them
            nobody in this program uses any more.
    """

    def __init__(
        self,
        key: str | None = None,
        same_hosts: HostsHandle | None = None,
        release: Callable[[HostsHandle, bool], Sequence[str]] | None = None,
    ) -> None:
        self.key = key or os.urandom(8).hex()
        self.release = release
        self.stopped = False
        self._shut_down: threading.Event = threading.Event() if same_hosts is None else same_hosts._shut_down
        with _lock:
            _by_key[self.key] = self

    @property
    def ended(self) -> str:
        """How the mesh was ended, so that it cannot be used any more; empty if it was not."""
        return "shut down" if self._shut_down.is_set() else "stopped" if self.stopped else ""

    def shut_down(self) -> None:
        """The hosts end."""
        self._shut_down.set()


def handle_of(key: str) -> HostsHandle:
    """Return this process's handle with that key, which a pickled mesh brought; a new one if there is none."""
    with _lock:
        return _by_key.get(key) or HostsHandle(key)
