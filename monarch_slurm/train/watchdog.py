"""Which rank of a replica has stopped making progress. Pure: events and times in, a verdict out.

There are two signs of life. A trainer says when it changes its phase and after every step: while it computes, each step
has a deadline of its own; while it syncs it may rightly wait for others, so the deadline there is long. And its process
answers a pulse, in every phase: an interpreter that does not has stopped, or is held by native code that keeps the GIL,
while the heartbeats that TorchFT's own threads send go on.
"""

from __future__ import annotations

from dataclasses import dataclass

from monarch_slurm.train.events import Event

START_DEADLINE = 180.0
"""Seconds from the spawn of a trainer to its first phase: fork, or imports and fork, and building model and sockets."""

EVAL_DEADLINE = 600.0
"""Seconds of an evaluation."""

WARMUP_DEADLINE = 3600.0
"""Seconds of building and compiling a model before the first step."""

SAVE_DEADLINE = 1800.0
"""Seconds of writing the state to disk."""


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
        now: the present time. All times are of one `AwakeClock`: time in which the job was suspended does not count.
    """

    def __init__(self, ranks: int, step_deadline: float, sync_deadline: float, now: float) -> None:
        self._deadlines = {
            "start": START_DEADLINE,
            "warmup": WARMUP_DEADLINE,
            "compute": step_deadline,
            "sync": sync_deadline,
            "eval": EVAL_DEADLINE,
            "save": SAVE_DEADLINE,
        }
        self._step_deadline = step_deadline
        self._progress = {rank: _Progress("start", now) for rank in range(ranks)}
        self._asked: dict[int, float] = {}

    def take(self, event: Event, now: float) -> None:
        """Note an event of one of the ranks."""
        progress = self._progress.get(event["rank"])
        if progress is None:
            return
        if event["kind"] == "phase":
            if progress.phase == "warmup" and event["rank"] in self._asked:
                self._asked[event["rank"]] = now  # it runs, and the answer may be on its way
            self._progress[event["rank"]] = _Progress(event["phase"], now)
        elif event["kind"] == "finished":
            del self._progress[event["rank"]]
            self._asked.pop(event["rank"], None)
        else:
            progress.since = now

    def extend(self, seconds: float) -> None:
        """Move every deadline by ``seconds``: the ranks wait for something that they are to wait for."""
        for progress in self._progress.values():
            progress.since += seconds

    def pulse_asked(self, rank: int, now: float) -> None:
        """The process of ``rank`` was asked for a sign of life."""
        if rank in self._progress:
            self._asked[rank] = now

    def pulse_answered(self, rank: int) -> None:
        """It gave one."""
        self._asked.pop(rank, None)

    def due(self) -> float | None:
        """Return the time of the next deadline, or None if nothing is watched any more."""
        return min((deadline for deadline, _, _, _ in self._deadlines_now()), default=None)

    def hung(self, now: float) -> tuple[int, str] | None:
        """Return the rank that is longest over its deadline and what it did not do, or None."""
        late = [entry for entry in self._deadlines_now() if entry[0] <= now]
        if not late:
            return None
        _, rank, since, what = min(late)
        return rank, f"{what} for {now - since:.1f} s"

    def _deadlines_now(self) -> list[tuple[float, int, float, str]]:
        steps = [
            (p.since + self._deadlines[p.phase], rank, p.since, f"no progress in phase {p.phase!r}")
            for rank, p in self._progress.items()
        ]
        silent = "its interpreter has not answered (stopped, or native code holds the GIL)"
        return steps + [(asked + self._patience(rank), rank, asked, silent) for rank, asked in self._asked.items()]

    def _patience(self, rank: int) -> float:
        """Return how long the interpreter may be silent: loading a library from a slow disk keeps the GIL."""
        return START_DEADLINE if self._progress[rank].phase == "warmup" else self._step_deadline
