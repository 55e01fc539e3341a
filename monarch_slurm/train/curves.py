"""A run over time and over tokens: participants, loss, tokens, what each replica did, and how much work was kept.

Functions of a list of events, as in `monarch_slurm.train.timeline`. Times are seconds since the epoch.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from monarch_slurm.train import units
from monarch_slurm.train.event_index import EventIndex, last_before
from monarch_slurm.train.events import Event
from monarch_slurm.train.timeline import Failure

Points = list[tuple[float, float]]

TRAINING, JOINING, DOWN, LOST = "training", "joining", "down", "lost"


@dataclass(frozen=True)
class Segment:
    """What one replica did from ``start`` to ``end``.

    Attributes:
        state: ``training``; ``joining``: started, but without the run's state; ``down``; ``lost``: for good.
        generation: the generation that did it, or that had died.
    """

    state: str
    start: float
    end: float
    generation: int


def participants(events: Iterable[Event] | EventIndex) -> Points:
    """Return the size of the quorum as a step function: ``(t, participants)`` at every change."""
    result: Points = []
    for e in _index(events).kind("quorum", "sync"):
        size = units.number(e.get("participants"))
        if size is not None and (not result or result[-1][1] != size):
            result.append((float(e["t"]), size))
    return result


def committed_tokens(events: Iterable[Event] | EventIndex) -> Points:
    """Return the committed tokens of the run as a step function: ``(t, tokens)`` at every increase.

    A start that goes on from a saved state has the tokens of that state, perhaps less than the start before it had.
    """
    result: Points = []
    at_step: dict[float, float] = {}
    for e in _index(events).kind("run_started", "sync", "finished"):
        step, tokens = units.number(e.get("step")) or 0.0, units.number(e.get("tokens"))
        if e["kind"] == "run_started":
            tokens = max((done for known, done in at_step.items() if known <= step), default=0.0)
            if result and tokens < result[-1][1]:
                result.append((float(e["t"]), tokens))
        elif tokens is not None and (e["kind"] != "sync" or e.get("committed") is True):
            at_step[step] = tokens
            if not result or tokens > result[-1][1]:
                result.append((float(e["t"]), tokens))
    return result


def tokens_at(curve: Sequence[tuple[float, float]], t: float) -> float:
    """Return how many tokens were committed by the time ``t``."""
    i = bisect.bisect_right(curve, t, key=lambda p: p[0])
    return curve[i - 1][1] if i else 0.0


def eval_loss(events: Iterable[Event] | EventIndex) -> Points:
    """Return ``(committed tokens, validation loss)``; replicas that evaluate the same parameters are averaged."""
    by_tokens: dict[float, list[float]] = defaultdict(list)
    for e in _index(events).kept("eval"):
        tokens, loss = units.number(e.get("tokens")), units.number(e.get("loss"))
        if tokens is not None and loss is not None:
            by_tokens[tokens].append(loss)
    return [(tokens, sum(losses) / len(losses)) for tokens, losses in sorted(by_tokens.items())]


def train_loss(events: Iterable[Event] | EventIndex, bins: int = 200) -> Points:
    """Return ``(committed tokens, training loss)``, smoothed: means over all replicas in at most ``bins`` bins."""
    points: Points = []
    for e in _index(events).kind("step"):
        tokens, loss = units.number(e.get("tokens")), units.number(e.get("loss"))
        if tokens is not None and loss is not None:
            points.append((tokens, loss))
    if not points:
        return []
    width = max(p[0] for p in points) / bins or 1.0
    binned: dict[int, Points] = defaultdict(list)
    for p in points:
        binned[min(bins - 1, int(p[0] / width))].append(p)
    return [
        (sum(p[0] for p in found) / len(found), sum(p[1] for p in found) / len(found))
        for _, found in sorted(binned.items())
    ]


def tokens_per_second(events: Iterable[Event] | EventIndex) -> float | None:
    """Return committed tokens per second, from the first inner step to the last commit, failures included.

    The time between two starts of the run does not count.
    """
    index = _index(events)
    tokens, steps = committed_tokens(index), index.kind("step", "quorum")
    starts = [float(e["t"]) for e in index.kind("run_started")]
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for e in steps:
        first.setdefault(bisect.bisect(starts, float(e["t"])), float(e["t"]) - (units.number(e.get("seconds")) or 0.0))
    for t, _ in tokens:
        last[bisect.bisect(starts, t)] = t
    length = sum(max(0.0, last[start] - began) for start, began in first.items() if start in last)
    return tokens[-1][1] / length if length > 0 else None


def goodput(events: Iterable[Event] | EventIndex) -> float | None:
    """Return the fraction of inner steps whose sync was committed; None if no trainer told of a step."""
    index = _index(events)
    done = kept = 0
    since: dict[tuple[Any, ...], int] = defaultdict(int)
    for e in index.kind("step", "sync"):
        trainer = tuple(units.index(e.get(name)) for name in ("replica", "generation", "rank"))
        if e["kind"] == "step":
            done += 1
            since[trainer] += 1
        else:
            steps = since.pop(trainer, 0)
            kept += steps if e.get("committed") is True else 0
    return kept / done if done else None


def lanes(events: Iterable[Event] | EventIndex, failures: Sequence[Failure]) -> dict[int, list[Segment]]:
    """Return what each replica did over time, without gaps from its first start to its end or the run's."""
    index = _index(events)
    end = index.span[1]
    failed: dict[tuple[int, int], float] = {}
    for f in failures:
        failed.setdefault((f.replica, f.generation), f.start)
    replicas = sorted({*index.generations, *(f.replica for f in failures)})
    return {replica: _lane(index, replica, failed, end) for replica in replicas}


def _lane(index: EventIndex, replica: int, failed: dict[tuple[int, int], float], end: float) -> list[Segment]:
    generations = sorted({*index.generations.get(replica, []), *(g for r, g in failed if r == replica)})
    given_up = index.lost_at(replica)
    lane: list[Segment] = []

    def add(state: str, start: float, stop: float, generation: int) -> None:
        if lane:
            start = max(start, lane[-1].end)
        if stop > start:
            lane.append(Segment(state, start, stop, generation))

    for i, generation in enumerate(generations):
        died = failed.get((replica, generation))
        finished = index.first("finished", replica, generation)
        following = [s for g in generations[i + 1 :] if (s := index.first("trainer_started", replica, g)) is not None]
        started = index.first("trainer_started", replica, generation)
        paused = None if started is None or died is not None or finished is not None else _run_ended(index, started)
        until = min([x for x in (died, finished, paused, *following[:1]) if x is not None], default=end)
        if started is not None:
            back = _has_state(index, replica, generation, first=i == 0)
            back = until if back is None else min(back, until)
            add(JOINING, started, back, generation)
            add(TRAINING, back, until, generation)
        if paused is not None:
            died = paused
        if died is None:
            continue
        stop = following[0] if following else end
        if given_up is not None and not following and given_up >= died:
            add(DOWN, died, min(given_up, stop), generation)
            add(LOST, given_up, stop, generation)
        else:
            add(DOWN, died, stop, generation)
    return lane


def _run_ended(index: EventIndex, t: float) -> float | None:
    """Return when the start of the run that was under way at ``t`` ended; None if it is the last one."""
    following = next((float(e["t"]) for e in index.kind("run_started") if float(e["t"]) > t), None)
    if following is None:
        return None
    ended = [float(e["t"]) for e in index.kind("run_finished") if t <= float(e["t"]) <= following]
    return ended[-1] if ended else last_before(index.events, math.nextafter(following, 0.0))


def _has_state(index: EventIndex, replica: int, generation: int, *, first: bool) -> float | None:
    """Return when a generation held the run's state: loaded, at its first quorum, or healed by the state's arrival."""
    quorums = index.of("quorum", replica, generation)
    if quorums and quorums[0].get("healing") is True:
        received = index.first("state_received", replica, generation)
        commits = [float(e["t"]) for e in index.of("sync", replica, generation) if e.get("committed") is True]
        return received if received is not None else min(commits, default=None)
    known = [float(quorums[0]["t"])] if quorums else []
    if (loaded := index.first("loaded", replica, generation)) is not None:
        known.append(loaded)
    if first and (stepped := index.first("step", replica, generation)) is not None:
        known.append(stepped)
    return min(known, default=None)


def downtime(lane: Sequence[Segment]) -> float:
    """Return the seconds that a replica did not train after it had begun to."""
    begun = next((i for i, s in enumerate(lane) if s.state == TRAINING), 0)
    return sum(s.end - s.start for s in lane[begun:] if s.state != TRAINING)


def training_replicas(all_lanes: dict[int, list[Segment]]) -> Points:
    """Return how many replicas trained, as a step function of time."""
    changes: dict[float, int] = defaultdict(int)
    for lane in all_lanes.values():
        for s in lane:
            if s.state == TRAINING:
                changes[s.start] += 1
                changes[s.end] -= 1
    result: Points = []
    level = 0
    for t, change in sorted(changes.items()):
        level += change
        if not result or result[-1][1] != level:
            result.append((t, float(level)))
    return result


def restarts(events: Iterable[Event] | EventIndex) -> dict[int, int]:
    """Return how often each replica was started again, other than with the whole run."""
    index = _index(events)
    starts = [float(e["t"]) for e in index.kind("run_started")]
    result = {}
    for replica, generations in index.generations.items():
        times = [index.first("trainer_started", replica, generation) or 0.0 for generation in generations]
        result[replica] = len(generations) - max(1, len({bisect.bisect_right(starts, t) for t in times}))
    return result


def _index(events: Iterable[Event] | EventIndex) -> EventIndex:
    return events if isinstance(events, EventIndex) else EventIndex(events)
