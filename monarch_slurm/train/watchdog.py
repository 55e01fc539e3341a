"""Which rank of a replica has stopped making progress. Pure: events and times in, a verdict out.

A trainer says when it changes its phase and after every step. While it computes, each step has a deadline of its own. While it syncs it
may rightly wait for others, so the deadline there is long: it only has to catch a rank that hangs inside a collective, whose peers
have been let go by the collective's own time-out.
"""

from __future__ import annotations

from dataclasses import dataclass

from monarch_slurm.train.events import Event

START_DEADLINE = 180.0
"""Seconds from the spawn of a trainer to its first phase: fork, or imports and fork, and building model and sockets."""

EVAL_DEADLINE = 600.0
"""Seconds of an evaluation."""


@dataclass
class _Progress:
    phase: str
    since: float


class Watchdog:
    """Watches the ranks of one generation of a replica.

    Args:
        ranks: number of ranks.
        step_deadline: seconds that one inner step may take.
        sync_deadline: seconds that one sync may take.
        now: the present time; all times are of the same monotonic clock.
    """

    def __init__(self, ranks: int, step_deadline: float, sync_deadline: float, now: float) -> None:
        self._deadlines = {
            "start": START_DEADLINE,
            "compute": step_deadline,
            "sync": sync_deadline,
            "eval": EVAL_DEADLINE,
        }
        self._progress = {rank: _Progress("start", now) for rank in range(ranks)}

    def take(self, event: Event, now: float) -> None:
        """Note an event of one of the ranks."""
        progress = self._progress.get(event["rank"])
        if progress is None:
            return
        if event["kind"] == "phase":
            self._progress[event["rank"]] = _Progress(event["phase"], now)
        elif event["kind"] == "finished":
            del self._progress[event["rank"]]
        else:
            progress.since = now

    def due(self) -> float | None:
        """Return the time of the next deadline, or None if nothing is watched any more."""
        return min((p.since + self._deadlines[p.phase] for p in self._progress.values()), default=None)

    def hung(self, now: float) -> tuple[int, str] | None:
        """Return the rank that is longest over its deadline and what it did not finish, or None."""
        over = [
            (now - progress.since - self._deadlines[progress.phase], rank, progress)
            for rank, progress in self._progress.items()
        ]
        late = [entry for entry in over if entry[0] >= 0]
        if not late:
            return None
        _, rank, progress = max(late, key=lambda entry: entry[0])
        waited = now - progress.since
        return rank, f"no progress in phase {progress.phase!r} for {waited:.1f} s"
