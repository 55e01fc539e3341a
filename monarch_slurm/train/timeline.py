"""What every failure of a run cost: when it was seen, how its replica came back, and who waited meanwhile.

Everything here is a function of a list of events (see `monarch_slurm.train.events`): nothing is measured, so that a
report can be built again from a saved list. Times are seconds since the epoch as the events carry them; the clocks of
the hosts are taken to agree.

Three questions need care, because failures overlap:

- *Which generation recovers from this failure?* The next one of the replica, and only that one. If it dies before its
  first commit, the stages that it did not reach stay None and the next failure has its own entry.
- *Who waited because of it?* A replica that lived, and whose next quorum came after the death.
- *Which syncs were lost because of it?* Each lost sync of a survivor is charged to one failure, so that sums are true.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from monarch_slurm.train import units
from monarch_slurm.train.event_index import EventIndex, last_before
from monarch_slurm.train.events import Event

STAGES = ("detected", "respawned", "joined", "state_received", "first_commit")
"""The stages of a recovery in their order; `Failure.times` and `Failure.seconds` have one entry for each."""

LOST_HOST = "Lost(host)"
"""The exit text of a proc whose host is gone."""

OUTCOMES = ("recovered", "failed again", "lost", "unrecovered")


@dataclass
class Failure:
    """One failure of one replica and what followed.

    Attributes:
        index: running number by time, from 1.
        failure: number of the injection; None if nothing was injected.
        type: ``kill``, ``segfault``, ``exception`` or ``hang`` as injected; ``host`` when the host was lost; else
            ``crash``.
        injected: time of the injection, or None.
        start: time that the seconds count from: the injection, else the detection.
        times: time of each stage of `STAGES`, None for a stage that was not reached (or not needed, such as the state).
        seconds: the same, counted from ``start``.
        outcome: one of `OUTCOMES`; "failed again" means that the next generation died before its first commit.
        stall: for each surviving replica, seconds that its first quorum after the death took.
        stall_longest: the largest of them.
        stall_attributable: seconds from the moment when the last survivor asked for that quorum until it formed.
        syncs_lost: syncs of surviving replicas that were thrown away because of this failure, summed over the replicas.
        state: for each rank of the new generation: ``rank``, ``step``, ``bytes``, ``sent`` and ``received`` (sha256),
            ``equal``, ``t``, ``seconds`` (of the transfer).
        state_equal: True if every transferred state had the donor's hash, None if nothing could be compared.
        respawn_level: how the replica was started again (``mesh`` or ``hosts``).
        escalated: reasons of the escalations on the way.
    """

    index: int
    failure: int | None
    type: str
    replica: int
    generation: int
    rank: int | None
    host: str | None
    injected: float | None
    start: float
    cause: str | None = None
    exit: str | None = None
    proc: str | None = None
    traceback: str | None = None
    stderr_tail: list[str] = field(default_factory=list)
    new_generation: int | None = None
    times: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(STAGES))
    seconds: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(STAGES))
    outcome: str = "unrecovered"
    stall: dict[int, float] = field(default_factory=dict)
    stall_longest: float | None = None
    stall_attributable: float | None = None
    syncs_lost: int = 0
    state: list[dict[str, Any]] = field(default_factory=list)
    state_equal: bool | None = None
    respawn_level: str | None = None
    attempts: int = 0
    escalated: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, as ``report.json`` holds them."""
        return asdict(self)


def failures(events: Iterable[Event] | EventIndex) -> list[Failure]:
    """Return every failure of the run, injected or merely detected, in time order."""
    index = events if isinstance(events, EventIndex) else EventIndex(events)
    found = _entries(index)
    by_replica: dict[int, list[Failure]] = defaultdict(list)
    for entry in found:
        by_replica[entry.replica].append(entry)
    for entry in found:
        _follow(index, entry, by_replica[entry.replica])
        _stall(index, entry, by_replica)
    _charge_lost_syncs(index, found)
    return found


def _entries(index: EventIndex) -> list[Failure]:
    """Pair injections with detections; a detection without an injection, and a lost host, are entries of their own."""
    entries: list[Failure] = []
    numbered: dict[int, Failure] = {}
    for e in index.kind("injected"):
        entry = _entry(index, e, injected=True)
        if entry is not None:
            entries.append(entry)
            if entry.failure is not None:
                numbered[entry.failure] = entry
    for e in index.kind("detected"):
        entry = _entry(index, e, injected=False)
        if entry is None:
            continue
        t = float(e["t"])
        known = numbered.get(entry.failure) if entry.failure is not None else None
        if known is not None and known.replica != entry.replica:
            known = None
        same = [x for x in entries if (x.replica, x.generation) == (entry.replica, entry.generation)]
        if known is None:
            known = next((x for x in same if x.times["detected"] is None and x.start <= t), None)
        if known is not None and known.times["detected"] is None:
            _describe(index, known, e)
        elif not same:
            # A second detection of a generation tells of its other ranks, which die with the first.
            _describe(index, entry, e)
            entries.append(entry)
    _add_lost_hosts(index, entries)
    entries.sort(key=lambda x: x.start)
    for i, entry in enumerate(entries, 1):
        entry.index = i
    return entries


def _entry(index: EventIndex, e: Event, *, injected: bool) -> Failure | None:
    replica = units.index(e.get("replica"))
    if replica is None:
        return None
    t = float(e["t"])
    generation = units.index(e.get("generation"))
    if generation is None:
        generation = index.generation_at(replica, t)
    kind = e.get("type")
    return Failure(
        index=0,
        failure=units.index(e.get("failure")),
        type=kind if isinstance(kind, str) and kind else "crash",
        replica=replica,
        generation=generation,
        rank=units.index(e.get("rank")),
        host=_text(e.get("host")) or _host_of(index, replica, generation, units.index(e.get("rank"))),
        injected=t if injected else None,
        start=t,
    )


def _describe(index: EventIndex, entry: Failure, e: Event) -> None:
    """Copy what a ``detected`` event knows into the entry; the trainer itself may have told the traceback before."""
    entry.times["detected"] = float(e["t"])
    entry.cause, entry.exit, entry.proc = _text(e.get("cause")), _text(e.get("exit")), _text(e.get("proc"))
    told = [_text(error.get("traceback")) for error in index.of("error", entry.replica, entry.generation)]
    entry.traceback = _text(e.get("traceback")) or next((text for text in told if text), None)
    tail = e.get("stderr_tail")
    if isinstance(tail, str):
        tail = tail.splitlines()
    entry.stderr_tail = [str(line) for line in tail] if isinstance(tail, (list, tuple)) else []
    entry.host = _text(e.get("host")) or entry.host
    if entry.injected is None and entry.exit == LOST_HOST:
        entry.type = "host"
    if entry.rank is None:
        entry.rank = units.index(e.get("rank"))


def _add_lost_hosts(index: EventIndex, entries: list[Failure]) -> None:
    """Name the failures that a lost host explains, and add those of its replicas that nobody has reported."""
    for e in index.kind("host_lost"):
        host, t = _text(e.get("host")), float(e["t"])
        if host is None:
            continue
        for replica in index.generations:
            generation = index.generation_at(replica, t)
            if host not in {_text(s.get("host")) for s in index.of("trainer_started", replica, generation)}:
                continue
            same = [x for x in entries if (x.replica, x.generation) == (replica, generation)]
            for entry in same:
                if entry.injected is None:
                    entry.type, entry.cause = "host", entry.cause or _text(e.get("cause"))
            if not same and not _ended(index, replica, generation, t):
                entry = Failure(0, None, "host", replica, generation, None, host, None, t, _text(e.get("cause")))
                entry.times["detected"] = t
                entries.append(entry)


def _follow(index: EventIndex, entry: Failure, of_replica: Sequence[Failure]) -> None:
    """Fill the stages from the events of the next generation, and how the story of this failure ended."""
    later = [x for x in of_replica if x.generation > entry.generation]
    limit = min((x.generation for x in later), default=None)
    candidates = [g for g in index.generations.get(entry.replica, []) if g > entry.generation]
    generation = candidates[0] if candidates and (limit is None or candidates[0] <= limit) else None
    entry.new_generation = generation
    entry.seconds["detected"] = _minus(entry.times["detected"], entry.start)
    if generation is not None:
        entry.state = _state(index, entry.replica, generation)
        compared = [s["equal"] for s in entry.state if s["equal"] is not None]
        entry.state_equal = all(compared) if compared else None
        received = [s["t"] for s in entry.state]
        commits = [float(e["t"]) for e in index.of("sync", entry.replica, generation) if e.get("committed") is True]
        entry.times["respawned"] = index.first("trainer_started", entry.replica, generation)
        entry.times["joined"] = index.first("quorum", entry.replica, generation)
        entry.times["state_received"] = max(received, default=None)
        entry.times["first_commit"] = min(commits, default=None)
        for stage in STAGES:
            entry.seconds[stage] = _minus(entry.times[stage], entry.start)
    # What the supervisor did lies between this failure and the next start (or the next failure).
    until = min(
        [x.start for x in later] + ([entry.times["respawned"]] if entry.times["respawned"] is not None else []),
        default=math.inf,
    )
    for e in index.kind("respawn", "escalated"):
        if e.get("replica") != entry.replica or not entry.start <= float(e["t"]) <= until:
            continue
        if e["kind"] == "respawn":
            entry.respawn_level, entry.attempts = _text(e.get("level")), entry.attempts + 1
        else:
            entry.escalated.append(_text(e.get("reason")) or _text(e.get("level")) or "escalated")
    lost_at = index.lost_at(entry.replica)
    given_up = lost_at is not None and lost_at >= entry.start
    if entry.times["first_commit"] is not None:
        entry.outcome = "recovered"
    elif later:
        entry.outcome = "failed again"
    elif given_up:
        entry.outcome = "lost"


def _state(index: EventIndex, replica: int, generation: int) -> list[dict[str, Any]]:
    """Compare, for each rank, the state that arrived with what a donor sent at that manager step."""
    result: list[dict[str, Any]] = []
    seen: set[int] = set()
    for e in index.of("state_received", replica, generation):
        rank = units.index(e.get("rank"), 0)
        assert rank is not None
        if rank in seen:
            continue
        seen.add(rank)
        received, step = _text(e.get("sha256")), e.get("step")
        sent = [
            hashed
            for s in index.kind("state_sent")
            if s.get("step") == step
            and units.index(s.get("rank"), 0) == rank
            and s.get("replica") != replica
            and (hashed := _text(s.get("sha256"))) is not None
        ]
        # More than one replica may have sent at a step (a sync that was not committed is asked for again); the state of
        # that step is the same whoever sends it, so one match is what was promised.
        donor = received if received in sent else sent[-1] if sent else None
        equal = received == donor if received is not None and donor is not None else None
        entry = {
            "rank": rank,
            "step": step,
            "bytes": e.get("bytes"),
            "sent": donor,
            "received": received,
            "equal": equal,
        }
        result.append({**entry, "t": float(e["t"]), "seconds": units.number(e.get("seconds"))})
    return sorted(result, key=lambda s: int(s["rank"]))


def _stall(index: EventIndex, entry: Failure, by_replica: dict[int, list[Failure]]) -> None:
    """Measure how long the survivors' next quorum took.

    The moment of death is the injection; for a failure that was only detected it is the replica's last sign of life,
    since the survivors may have waited long before anybody knew why.
    """
    start = entry.start
    if entry.injected is None:
        start = min(start, index.last_sign(entry.replica, entry.generation, entry.start) or start)
    victims_last = _victims_last_quorum(index, entry, start)
    living = [
        (replica, generation)
        for replica in index.generations
        if replica != entry.replica
        for generation in [index.generation_at(replica, start)]
        if not _ended(index, replica, generation, start)
        and not any(x.generation == generation and x.start <= start for x in by_replica.get(replica, []))
    ]
    # Who had not been in a quorum yet was joining, not training. At the start of a run that is everybody.
    participants = [(r, g) for r, g in living if (index.first("quorum", r, g) or math.inf) <= start]
    last_asked = -math.inf
    for replica, generation in participants or living:
        held = _next_quorum(index, replica, generation, start, victims_last)
        if held is None:
            continue
        asked, formed, waited = held
        entry.stall[replica] = waited
        if asked > last_asked:
            last_asked = asked
            # While the victim of an injection still lived, waiting for it was nobody's fault.
            since = max(asked, start) if entry.injected is not None else asked
            entry.stall_attributable = round(max(0.0, formed - since), 6)
    entry.stall_longest = max(entry.stall.values(), default=None)


def _victims_last_quorum(index: EventIndex, entry: Failure, start: float) -> tuple[float, Any, Any] | None:
    quorums = index.of("quorum", entry.replica, entry.generation)
    i = bisect.bisect_right(quorums, start, key=lambda e: float(e["t"]))
    return (float(quorums[i - 1]["t"]), quorums[i - 1].get("quorum_id"), quorums[i - 1].get("step")) if i else None


def _next_quorum(
    index: EventIndex, replica: int, generation: int, start: float, victims_last: tuple[float, Any, Any] | None
) -> tuple[float, float, float] | None:
    """Return when a survivor asked for its first quorum that the death could hold up, when it formed, and its wait.

    The quorum that the victim itself took part in last is told of by each participant at a slightly different time,
    perhaps after the death; it was not held up. It is known by its number and step, and by having been asked for before
    the victim had it (after a lost sync the same numbers come again).
    """
    best: tuple[float, float, float] | None = None
    ranks_seen: set[int | None] = set()
    quorums = index.of("quorum", replica, generation)
    all_asked = index.of("quorum_asked", replica, generation)
    for e in quorums[bisect.bisect_right(quorums, start, key=lambda e: float(e["t"])) :]:
        formed, rank = float(e["t"]), units.index(e.get("rank"))
        if rank in ranks_seen:
            break
        waited = units.number(e.get("seconds"))
        asked = last_before([a for a in all_asked if units.index(a.get("rank")) == rank], formed)
        if asked is None:
            asked = formed - (waited or 0.0)
        if (
            victims_last is not None
            and (e.get("quorum_id"), e.get("step")) == victims_last[1:]
            and asked <= victims_last[0]
        ):
            continue
        ranks_seen.add(rank)
        if best is None or (waited or 0.0) > best[2]:
            best = (asked, formed, waited if waited is not None else formed - asked)
    return best


def _charge_lost_syncs(index: EventIndex, found: Sequence[Failure]) -> None:
    """Charge each uncommitted sync to one failure of another replica.

    That is the first one since the replica's previous sync (it was enough to break this one), else the latest before
    it; a failure that lies before a committed sync of the same replica is behind it.
    """
    died = {
        id(x): x.start if x.injected is not None else index.last_sign(x.replica, x.generation, x.start) or x.start
        for x in found
    }
    for replica, generations in index.generations.items():
        for generation in generations:
            syncs = index.of("sync", replica, generation)
            rank = min((units.index(e.get("rank"), 0) or 0 for e in syncs), default=0)
            previous = committed = -math.inf
            for e in syncs:
                if (units.index(e.get("rank"), 0) or 0) != rank:
                    continue
                t = float(e["t"])
                if e.get("committed") is False:
                    suspects = sorted(
                        (x for x in found if x.replica != replica and committed < died[id(x)] <= t),
                        key=lambda x: died[id(x)],
                    )
                    recent = [x for x in suspects if died[id(x)] > previous]
                    if suspects:
                        (recent[0] if recent else suspects[-1]).syncs_lost += 1
                elif e.get("committed") is True:
                    committed = t
                previous = t


def _ended(index: EventIndex, replica: int, generation: int, t: float) -> bool:
    finished = index.first("finished", replica, generation)
    return (finished is not None and finished <= t) or index.lost_at(replica, t) is not None


def _host_of(index: EventIndex, replica: int, generation: int, rank: int | None) -> str | None:
    started = index.of("trainer_started", replica, generation)
    exact = [e for e in started if rank is not None and e.get("rank") == rank]
    return next((_text(e.get("host")) for e in exact or started), None)


def _minus(t: float | None, start: float) -> float | None:
    return None if t is None else round(t - start, 6)


def _text(value: Any) -> str | None:
    return None if value is None or value == "" else str(value)
