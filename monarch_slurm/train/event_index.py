"""The events of a run, sorted and indexed once, so that each question about them is a look-up."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from monarch_slurm.train import units
from monarch_slurm.train.events import Event


class EventIndex:
    """The usable events of a run in time order, found by kind or by replica and generation.

    Entries without a ``kind`` or a finite ``t`` are dropped: the last words of a dying process may be anything.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        usable = (
            e
            for e in events
            if isinstance(e, dict) and isinstance(e.get("kind"), str) and units.number(e.get("t")) is not None
        )
        self.events: list[Event] = sorted(usable, key=lambda e: float(e["t"]))
        self._kinds: dict[str, list[Event]] = defaultdict(list)
        self._replicas: dict[tuple[str, int, int], list[Event]] = defaultdict(list)
        self.generations: dict[int, list[int]] = {}
        """Generations of each replica that a trainer of is known, ascending."""
        generations: dict[int, set[int]] = defaultdict(set)
        for e in self.events:
            self._kinds[e["kind"]].append(e)
            replica, generation = units.index(e.get("replica")), units.index(e.get("generation"))
            if replica is not None and generation is not None:
                self._replicas[e["kind"], replica, generation].append(e)
                if e["kind"] == "trainer_started":
                    generations[replica].add(generation)
        self.generations = {replica: sorted(found) for replica, found in sorted(generations.items())}

    def kind(self, *kinds: str) -> list[Event]:
        """Return the events of one kind, or of several in time order."""
        if len(kinds) == 1:
            return self._kinds.get(kinds[0], [])
        return sorted((e for kind in kinds for e in self._kinds.get(kind, [])), key=lambda e: float(e["t"]))

    def kept(self, kind: str) -> list[Event]:
        """Return the events of one kind, without those of steps that were done again when the run went on."""
        started = self.kind("run_started")
        times = [float(e["t"]) for e in started]
        # A start goes on from the state of its step: what earlier starts did beyond that is void.
        most = [math.inf]
        for e in reversed(started):
            most.append(min(most[-1], units.number(e.get("step")) or 0.0))
        most.reverse()
        return [
            e
            for e in self.kind(kind)
            if (units.number(e.get("step")) or 0.0) <= most[bisect.bisect(times, float(e["t"]))]
        ]

    def of(self, kind: str, replica: int, generation: int) -> list[Event]:
        """Return the events of one kind of one generation of a replica, all ranks."""
        return self._replicas.get((kind, replica, generation), [])

    def first(self, kind: str, replica: int, generation: int) -> float | None:
        """Return the time of the first such event, or None."""
        found = self.of(kind, replica, generation)
        return float(found[0]["t"]) if found else None

    def lost_at(self, replica: int, until: float = math.inf) -> float | None:
        """Return when ``replica`` was given up, if it was and had not been started again by the time ``until``."""
        found: float | None = None
        for e in self.kind("replica_lost", "respawn"):
            if e.get("replica") == replica and float(e["t"]) <= until:
                found = float(e["t"]) if e["kind"] == "replica_lost" else None
        return found

    def is_last_word(self, lost: Event) -> bool:
        """Return whether the replica of a ``replica_lost`` event was not started again after it."""
        t, replica = float(lost["t"]), lost.get("replica")
        return not any(e.get("replica") == replica and float(e["t"]) >= t for e in self.kind("respawn"))

    def generation_at(self, replica: int, t: float) -> int:
        """Return the generation of ``replica`` that was started last by the time ``t``."""
        started = [
            g for g in self.generations.get(replica, []) if (self.first("trainer_started", replica, g) or 0.0) <= t
        ]
        return started[-1] if started else 0

    def last_sign(self, replica: int, generation: int, before: float) -> float | None:
        """Return the time of the last trainer event of a generation up to ``before``: it lived until then at least."""
        kinds = ("trainer_started", "engine_ready", "phase", "step", "quorum_asked", "quorum", "sync", "eval")
        times = [
            last for kind in kinds if (last := last_before(self.of(kind, replica, generation), before)) is not None
        ]
        return max(times, default=None)

    @property
    def span(self) -> tuple[float, float]:
        """Start and end of the run: ``run_started`` and ``run_finished`` if known, else the outermost events."""
        if not self.events:
            return 0.0, 0.0
        started, finished = self.kind("run_started"), self.kind("run_finished")
        start = float(started[0]["t"]) if started else float(self.events[0]["t"])
        end = float(finished[-1]["t"]) if finished else float(self.events[-1]["t"])
        return start, max(start, end)


def last_before(events: Sequence[Event], t: float) -> float | None:
    """Return the time of the last of ``events`` (sorted by time) up to ``t``, or None."""
    i = bisect.bisect_right(events, t, key=lambda e: float(e["t"]))
    return float(events[i - 1]["t"]) if i else None
