"""What is sent to procs that cannot take it now: it waits in a mailbox until they can, or is refused.

A proc has a mailbox until it has reported, while it ends, and from its failure to its next start if somebody may start
it again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from monarch_slurm.host.exits import ProcDown
from monarch_slurm.wire import Message

MAX_TOMBSTONES = 10_000
"""Procs whose end a host remembers."""

_NOT_THERE = "NotThere(this host has no such proc)"


@dataclass
class Mailbox:
    """What waits for one proc.

    Attributes:
        first: what it is told first; None until somebody spawns it.
        actors: spawn messages of actors that are made anew in it, before it takes anything else.
        messages: the rest, in the order of arrival.
    """

    first: Message | None = None
    actors: list[Message] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)


class Mailboxes:
    """The mailboxes of one host's procs, by name, and the ends of those that will take nothing any more.

    Args:
        host: id of the host; ``host_name`` the name that people know.
    """

    def __init__(self, host: str, host_name: str) -> None:
        self._host = host
        self._host_name = host_name
        self._boxes: dict[str, Mailbox] = {}
        self._tombstones: dict[str, ProcDown] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._boxes

    def open(self, name: str) -> Mailbox:
        """Return the mailbox of ``name``, a new one if it has none."""
        return self._boxes.setdefault(name, Mailbox())

    def close(self, name: str) -> Mailbox | None:
        """Return the mailbox of ``name`` with what is in it, and forget it."""
        return self._boxes.pop(name, None)

    def keep(self, name: str, message: Message) -> bool:
        """Put ``message`` into the mailbox of ``name``; False if it has none."""
        box = self._boxes.get(name)
        if box is not None:
            box.messages.append(message)
        return box is not None

    def awaiting_restart(self, mesh: str) -> list[str]:
        """Return the names of the procs of ``mesh`` that have ended, and may be started again."""
        return [name for name, box in self._boxes.items() if box.first is None and name.rpartition(".")[0] == mesh]

    def bury(self, down: ProcDown) -> list[Message]:
        """Note the end of a proc that does not start again; return what has waited for it."""
        self._tombstones[down.proc] = down
        while len(self._tombstones) > MAX_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]
        box = self._boxes.pop(down.proc, None)
        return box.messages if box is not None else []

    def is_buried(self, name: str) -> bool:
        """Return whether a proc of this name has ended, and does not start again."""
        return name in self._tombstones

    def end_of(self, name: str, exit_text: str = _NOT_THERE) -> ProcDown:
        """Return how the proc ended; ``exit_text`` says it of one that is not known."""
        down = self._tombstones.get(name)
        if down is None:
            mesh, _, rank = name.rpartition(".")
            number = int(rank) if rank.isdecimal() else 0
            down = ProcDown(self._host, self._host_name, name, mesh, number, 0, exit_text, time.time())
        return down
