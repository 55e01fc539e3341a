"""How long an agent keeps its procs without its controller.

The kernel reports the end of a controller on the same machine, so its silence means nothing there. Nor does it while
the controller's machine acknowledges what this agent sends: a kernel closes the connections of a process that has
ended. A controller that leaves in order withdraws its invitation. One that has attached to a worker is gone when it is
silent and its machine refuses connections: nothing listens there any more. Any other controller is gone after the lease
(setting ``mesh_orphan_timeout``): so many seconds of silence in which this agent could have heard it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from monarch_slurm.config import settings
from monarch_slurm.host.doorbell import Doorbell
from monarch_slurm.wire import Loop, Timer
from monarch_slurm.wire.keys import CONTROLLER_FILE

_ENDED = "the controller has ended"


class Lease:
    """The lease of one agent.

    Args:
        loop: the agent's loop, on whose thread everything here happens.
        folder: job folder, whose ``controller.json`` vanishes when the controller ends; None if there is none.
        on_beat: called once per heartbeat interval while the lease holds.
        on_over: called with the reason when it is over.
        address: where the controller listens, ``tcp://host:port``.
        beside: the controller is a process of this machine, see `watch`.
        machine_silence: returns the seconds since the controller's machine acknowledged something; None if that is not
            known.
    """

    def __init__(
        self,
        loop: Loop,
        folder: Path | None,
        on_beat: Callable[[], None],
        on_over: Callable[[str], None],
        address: str,
        beside: bool,
        machine_silence: Callable[[], float | None],
    ) -> None:
        self._loop = loop
        self._folder = folder
        self._on_beat = on_beat
        self._on_over = on_over
        self._doorbell = Doorbell(address)
        self._beside = beside
        self._machine_silence = machine_silence
        self._last_heard = self._last_answered = loop.awake
        self._met = False
        self._next_beat: Timer | None = None

    def heard(self) -> None:
        """Note that the controller has said something."""
        self._met = True
        self._last_heard = self._last_answered = self._loop.awake

    def watch(self, pid: int) -> None:
        """The controller is the process ``pid`` of this machine."""
        try:
            self._loop.watch_process(pid, lambda: self._on_over(_ENDED))
        except ProcessLookupError:
            self._loop.call_soon(lambda: self._on_over(_ENDED))

    def beat(self) -> None:
        """Look at the lease now, and from here on once per interval."""
        if self._next_beat is not None:
            self._next_beat.cancel()
        interval = settings().heartbeat_interval
        over = self._over(self._loop.awake, interval)
        if over:
            self._on_over(over)
        else:
            self._on_beat()
            self._next_beat = self._loop.call_later(interval, self.beat)

    def _over(self, now: float, interval: float) -> str:
        """Return why the lease is over; an empty text if it is not."""
        silence = now - self._last_heard
        if silence <= interval:
            return ""
        if silence > 2 * interval and self._controller_left():
            return _ENDED
        if self._beside and self._met:  # before that, its pid may meanwhile be another process's
            return ""
        machine = self._machine_silence()
        if machine is not None:
            self._last_answered = max(self._last_answered, now - machine)
        elif silence > settings().missed_heartbeats * interval and self._folder is None and self._doorbell.is_gone():
            return f"{_ENDED}: nothing listens at its address any more"
        unanswered, limit = now - self._last_answered, settings().mesh_orphan_timeout
        if limit is not None and unanswered > limit:
            return f"nothing heard from the controller for {unanswered:.0f} s"
        return ""

    def _controller_left(self) -> bool:
        return self._folder is not None and not (self._folder / CONTROLLER_FILE).exists()
