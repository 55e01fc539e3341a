"""Which hosts a cast goes to, worked out once per mesh and slice."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from monarch_slurm.actor.layout import ProcLayout
from monarch_slurm.actor.ndslice import Slice
from monarch_slurm.config import settings
from monarch_slurm.host.places import Places
from monarch_slurm.host.shares import for_one_host
from monarch_slurm.rank_ranges import ranges
from monarch_slurm.wire import AGENT, CONTROLLER, Address, Message
from monarch_slurm.wire.large_buffers import Buffer

_REMEMBERED = 256


@dataclass(frozen=True)
class Targets:
    """The procs of one cast: their base ranks by host, and a text that stands for them."""

    mesh: str
    key: str
    by_host: dict[str, list[int]]

    def messages(
        self, sender: Address, places: Places, fields: dict[str, Any], body: Sequence[Buffer]
    ) -> Iterator[Message]:
        """Yield what is sent: a message per host, or if there are many hosts one for all."""
        near = self.by_host
        if self.key:
            # What stays on the sender's host does not go through the controller, and so all messages between two
            # processes go one way.
            here = sender.host
            near = {here: self.by_host[here]} if here in self.by_host else {}
            far = [item for item in self.by_host.items() if item[0] != here] if near else list(self.by_host.items())
            to_all = {"proc_mesh": self.mesh, "targets": far, "key": self.key, **fields}
            yield Message("casts", CONTROLLER, sender, to_all, body)
        cast = Message("cast", CONTROLLER, sender, {"proc_mesh": self.mesh, **fields}, body)
        for host, ranks in near.items():
            yield for_one_host(cast, Address(places.now(host), AGENT), ranks)


class TargetTable:
    """The targets of the casts of one process. For any thread."""

    def __init__(self) -> None:
        self._fanout = 0
        self._known: dict[tuple[str, Slice], Targets] = {}
        self._lock = threading.Lock()

    def find(self, layout: ProcLayout, ranks: Iterable[int]) -> Targets:
        """Return the targets of a cast to the procs ``ranks`` of a mesh; ``key`` is empty if they are not many."""
        if isinstance(ranks, Slice):
            known = self._known.get((layout.mesh, ranks))
            if known is not None:
                return known
        ranks = ranks if isinstance(ranks, Slice) else sorted(ranks)
        by_host = layout.by_host(ranks)
        self._fanout = self._fanout or settings().max_cast_fanout
        key = ""
        if len(by_host) > self._fanout:
            key = f"{layout.mesh} {ranks if isinstance(ranks, Slice) else ranges(ranks)!r}"
        found = Targets(layout.mesh, key, by_host)
        if not isinstance(ranks, Slice):
            return found
        with self._lock:
            self._known[layout.mesh, ranks] = found
            while len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
        return found
