"""The processes that the communicators of this process reach: when one is lost, all its communicators here are aborted.

The control plane knows of a death within milliseconds; the libraries wait for minutes, or for ever. It is also the only
one that knows which rank it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

Abort = Callable[[str, int], None]
"""Aborts a communicator: reason, and the rank that is lost."""


class Membership:
    """What `enroll` returns: a communicator whose peers are watched."""

    def __init__(self, processes: Sequence[Any], abort: Abort) -> None:
        self.processes = list(processes)
        self.abort = abort
        self._ends: list[Callable[[], None]] = []

    def watch(self, runtime: Any) -> None:
        """Abort on news of the end of a peer, until `end`."""
        from monarch_slurm.actor.watching import watch_process

        for rank, process in enumerate(self.processes):
            if process is not None and process != runtime.address:
                self._ends.append(
                    watch_process(runtime, process, lambda reason, rank=rank: self.abort(reason, rank))  # type: ignore[misc]
                )

    def end(self) -> None:
        """Stop watching. Again does nothing."""
        with _lock:
            if self in _memberships:
                _memberships.remove(self)
            ends, self._ends = self._ends, []
        for end in ends:
            end()


_lock = threading.Lock()
_memberships: list[Membership] = []


def enroll(runtime: Any, processes: Sequence[Any], abort: Abort) -> Membership:
    """Abort a communicator of this process once one of its processes is lost.

    Args:
        runtime: the actor runtime of this process; None where there is none, and no news comes.
        processes: the control plane's address of each rank; None where it is not known.
        abort: called with the reason and the rank, from any thread, perhaps more than once. It must not block.
    """
    made = Membership(processes, abort)
    with _lock:
        _memberships.append(made)
    if runtime is not None:
        made.watch(runtime)
    return made


def lose(process: Any, reason: str) -> None:
    """Abort every communicator of this process that has ``process`` as a peer: it hangs, for instance."""
    with _lock:
        memberships = [each for each in _memberships if process in each.processes]
    for each in memberships:
        each.abort(reason, each.processes.index(process))
