"""Processes that procs started and left behind: whose they are, and when they end.

The agent is a subreaper: whatever a proc started becomes the agent's child once its parent is gone. An orphan may live
as long as the proc that it comes from (daemons that start themselves in the background are orphans from their first
moment), and no longer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from monarch_slurm.host import kernel
from monarch_slurm.host.shared_memory_files import CLEANER_SECONDS, cleans_up
from monarch_slurm.wire import Loop

PROC_VARIABLE = "MONARCH_SLURM_PROC"
"""Environment variable by which everything that a proc started can be told to come from it."""

REPEAT_SECONDS = 0.02
"""Pause between two looks while orphans are being killed: each one's own children are orphans after it."""


class Orphans:
    """Ends and reaps the orphans of one agent.

    Args:
        procs: names and pids of the procs that live.
        known: pids of children that are none of this class's business.
        unsettled: whether a child may be there that ``known`` does not name yet.
        on_reaped: called with the pid of each orphan that has ended.
    """

    def __init__(
        self,
        loop: Loop,
        procs: Callable[[], Mapping[str, int]],
        known: Callable[[], set[int]],
        unsettled: Callable[[], bool],
        on_reaped: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._procs = procs
        self._known = known
        self._unsettled = unsettled
        self._on_reaped = on_reaped
        self._armed = False
        self._cleaners: dict[int, float] = {}
        """Processes that clean up after dead procs, and until when they may."""

    def sweep(self) -> None:
        """Kill orphans of procs that are gone, and reap those that have ended; look again until there are none."""
        if self._unsettled():
            self._look_again()
            return
        known = self._known()
        procs = dict(self._procs())
        again = False
        for pid in kernel.children():
            if pid in known:
                continue
            if _reap(pid):
                self._on_reaped(pid)
                continue
            if not _comes_from_one_of(pid, procs):
                if not self._may_clean_up(pid):
                    kernel.kill(pid)
                again = True
        if again:
            self._look_again()

    def _may_clean_up(self, pid: int) -> bool:
        if not cleans_up(pid):
            return False
        now = self._loop.clock()
        self._cleaners = {one: until for one, until in self._cleaners.items() if until > now - CLEANER_SECONDS}
        return now < self._cleaners.setdefault(pid, now + CLEANER_SECONDS)

    def _look_again(self) -> None:
        if not self._armed:
            self._armed = True
            self._loop.call_later(REPEAT_SECONDS, self._sweep_again)

    def _sweep_again(self) -> None:
        self._armed = False
        self.sweep()


def _reap(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


def _comes_from_one_of(pid: int, procs: Mapping[str, int]) -> bool:
    name = kernel.environment_value(pid, PROC_VARIABLE)
    if name is not None:
        return name in procs
    # A forked process shows the environment of the zygote; it mostly has the proc's process group or session.
    group, session = kernel.family(pid)
    return group in procs.values() or session in procs.values()
