"""How long an agent goes on without its controller.

The end of a controller on the same machine is seen at once, and of one that leaves in order its invitation vanishes.
So does one that has attached to a worker, is silent and has its machine refuse connections: nothing listens there
any more. Any other that is silent for longer than the lease (setting ``mesh_orphan_timeout``) counts as gone.
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
    """

    def __init__(
        self,
        loop: Loop,
        folder: Path | None,
        on_beat: Callable[[], None],
        on_over: Callable[[str], None],
        address: str,
    ) -> None:
        self._loop = loop
        self._folder = folder
        self._on_beat = on_beat
        self._on_over = on_over
        self._doorbell = Doorbell(address)
        self._last_heard = loop.clock()
        self._next_beat: Timer | None = None

    def heard(self) -> None:
        """Note that the controller has said something."""
        self._last_heard = self._loop.clock()

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
        if self._loop.late > interval:
            self._last_heard += self._loop.late  # this process did not run; it cannot have heard anything
        silence = self._loop.clock() - self._last_heard
        if silence > (settings().mesh_orphan_timeout or silence):  # None: for ever
            self._on_over(f"nothing heard from the controller for {silence:.0f} s")
        elif silence > 2 * interval and self._controller_left():
            self._on_over(_ENDED)
        elif silence > settings().missed_heartbeats * interval and self._folder is None and self._doorbell.is_gone():
            self._on_over(f"{_ENDED}: nothing listens at its address any more")
        else:
            self._on_beat()
            self._next_beat = self._loop.call_later(interval, self.beat)

    def _controller_left(self) -> bool:
        return self._folder is not None and not (self._folder / CONTROLLER_FILE).exists()
