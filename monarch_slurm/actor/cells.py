"""The actors of a process: made, called and stopped as messages say. Whoever asks for one that is gone hears why.

With a restart policy a process fails with its actor, and whoever asks is told by the news of that end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch_slurm.actor.ends import Tombstones
from monarch_slurm.actor.messages import Call
from monarch_slurm.actor.waits import tell
from monarch_slurm.host.exits import FailureKind
from monarch_slurm.wire import Address, Message

if TYPE_CHECKING:
    from monarch_slurm.actor.cell import Cell

_NO_SUCH_ACTOR = "this process has no such actor"


class Cells:
    """The cells of one process.

    Args:
        make_cell: makes a cell for a spawn message.
        refuse: tells a process that the actor of a mesh is not here, or no longer, and why.

    Attributes:
        on_demand: actors that begin with their first message: by mesh, what spawns them.
        on_failed: ends this process as a failure, with the kind, the event and the traceback of the actor that has
            failed; None for a process that does not end so.
    """

    def __init__(self, make_cell: Callable[[Message], Cell], refuse: Callable[[Address, str, str], None]) -> None:
        self._make_cell = make_cell
        self._refuse = refuse
        self._cells: dict[str, Cell] = {}
        self._ended = Tombstones()
        self._lock = threading.Lock()
        self._failing = False
        self.on_demand: dict[str, Callable[[], None]] = {}
        self.on_failed: Callable[[FailureKind, str, str | None], None] | None = None

    def knows(self, mesh: str) -> bool:
        """Return whether this process has, or had, an actor of ``mesh``. For any thread."""
        return mesh in self._cells or mesh in self._ended or mesh in self.on_demand

    def describe(self) -> list[dict[str, Any]]:
        """Return what the actors are and do."""
        return [cell.describe() for cell in list(self._cells.values())]

    def take_at_once(self, message: Message) -> bool:
        """Take a cast if any thread may: a call of an actor that has begun. False for any other."""
        fields = message.fields
        if fields["op"] != "call" or fields["mesh"] in self.on_demand:
            return False
        self.take(message)
        return True

    def take(self, message: Message) -> None:
        """Take a cast: spawn an actor, call or stop it."""
        if message.fields["op"] == "spawn":
            self._spawn(message)
            return
        mesh = message.fields["mesh"]
        if mesh in self.on_demand:
            self.on_demand.pop(mesh)()
        cell = self._cells.get(mesh)
        call = Call(message) if message.fields["op"] == "call" else None
        asker = message.src if call is None else call.asker
        if cell is None:
            refused = self._ended.get(mesh, _NO_SUCH_ACTOR)
        elif call is not None:
            refused = cell.put(call)
        else:
            refused = cell.stop(message.fields["reason"], message.fields["timeout"], asker)
        if refused and asker is not None and not self._fails_with(cell):
            self._refuse(asker, mesh, refused)

    def _spawn(self, message: Message) -> None:
        mesh = message.fields["mesh"]
        if mesh in self._cells:
            return  # one of those that were made anew
        self._cells[mesh] = cell = self._make_cell(message)
        cell.start()

    def _fails_with(self, cell: Cell | None) -> bool:
        """Return whether this process ends for an actor that has failed, which may be that of ``cell``."""
        return self._failing or (cell is not None and cell.failed and self.on_failed is not None and cell.kept)

    def ended(self, cell: Cell, event: str, traceback: str | None, kind: FailureKind | None) -> bool:
        """Note that an actor has failed or stopped; return whether this process goes on."""
        mesh = cell.ref.mesh
        with self._lock:
            self._failing = self._failing or (kind is not None and self.on_failed is not None and cell.kept)
            self._ended[mesh] = event
            self._cells.pop(mesh, None)
        if not self._failing:
            return True
        if kind is not None and self.on_failed is not None:
            self.on_failed(kind, event, traceback)
        return False

    def tell_wait(self, message: Message) -> None:
        """Answer whether an actor waits for the one that asks."""
        cell = self._cells.get(message.fields["mesh"])
        if cell is not None:
            tell(cell, message)

    def end_owned_by(self, gone: Callable[[Address], bool], why: str) -> None:
        """End the actors whose owner is in a process that is ``gone``."""
        for cell in list(self._cells.values()):
            if gone(cell.owner):
                cell.end(f"its owner is gone: {why}", failed=False)

    def stop(self, reason: str, timeout: float) -> list[Cell]:
        """Ask every actor to stop, within ``timeout`` seconds; return those that still have to."""
        cells = list(self._cells.values())
        for cell in cells:
            cell.stop(reason, timeout, watched=True)
        return cells
