"""Actors that were told to stop, and processes that do not even answer that.

A process gives its stuck actors up by itself (`monarch_slurm.actor.cell`). One that does not, because native code holds
its interpreter, has to be killed; but one that is merely slow, on a busy machine, must not be. So it is asked first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from monarch_slurm.actor.layout import ActorRef
from monarch_slurm.actor.replies import Source
from monarch_slurm.config import settings
from monarch_slurm.wire import CONTROLLER, Message
from monarch_slurm.wire.task_limits import start_timer

if TYPE_CHECKING:
    from monarch_slurm.actor.runtime import Runtime

logger = logging.getLogger(__name__)


class Stopping:
    """Actors of a mesh that were told to stop. For any thread.

    Args:
        ref: the mesh; ``ranks`` are the base ranks of those that are to stop.
        on_stopped: called when all have ended.
    """

    def __init__(self, runtime: Runtime, ref: ActorRef, ranks: Collection[int], on_stopped: Callable[[], None]) -> None:
        self._runtime = runtime
        self._ref = ref
        self._left = set(ranks)
        self._on_stopped = on_stopped
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._silent: set[int] = set()
        if not ranks:
            on_stopped()

    def ended(self, rank: int, *_: object) -> None:
        """Note that one has ended."""
        with self._lock:
            self._left.discard(rank)
            over = not self._left
            if over and self._timer is not None:
                self._timer.cancel()
        if over:
            self._on_stopped()

    def watch(self, seconds: float) -> None:
        """After ``seconds``, look after processes that have not told of the end of their actors."""
        if self._ref.layout.hosts[0] != CONTROLLER.host:  # which is this program
            self._start_timer(seconds, self._ask)

    def _start_timer(self, seconds: float, then: Callable[[], None]) -> None:
        with self._lock:
            if self._left:
                self._timer = threading.Timer(seconds, then)
                start_timer(self._timer, "the stop of actors")

    def _ask(self) -> None:
        layout, replies = self._ref.layout, self._runtime.replies
        with self._lock:
            self._silent = set(self._left)
            asked = sorted(self._left)
        sources: dict[int, Source] = {rank: (layout.address(rank), None) for rank in asked}
        number = replies.expect(sources, lambda rank, *_: self._silent.discard(rank), lambda *_: None)
        for rank in asked:
            fields = {"port": number, "rank": rank}
            self._runtime.send(Message("describe", layout.address(rank), self._runtime.address, fields))
        self._start_timer(settings().process_exit_timeout, lambda: self._kill_silent(number))

    def _kill_silent(self, number: int) -> None:
        self._runtime.replies.forget(number)
        with self._lock:
            stuck = sorted(self._left & self._silent)
        if stuck:
            event = (
                f"the process has neither stopped its actor of {self._ref.name!r} nor answered within "
                f"{settings().process_exit_timeout:g} s (setting process_exit_timeout) and was killed: native code may "
                "hold its interpreter"
            )
            logger.error("%s: procs %s of %s", event, stuck, self._ref.layout.mesh)
            self._runtime.ask_agents("kill", self._ref.layout, stuck, signal=9, event=event)
        self._start_timer(settings().process_exit_timeout, self._ask)
