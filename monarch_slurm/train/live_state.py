"""The state of a running training, folded from its events one at a time; the live view draws it.

Each event costs the same, however long the run is. Events may be of unknown kinds, lack fields or be stale: what cannot
be used is passed over.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from monarch_slurm.train import units
from monarch_slurm.train.events import TRAINER_KINDS

Level = Literal["info", "bad", "good", "warn"]

RATE_WINDOW = 60.0
"""Seconds over which tokens per second are averaged."""

_SMOOTHING = 0.05  # of the training loss; about the last 20 steps of any replica


@dataclass(frozen=True)
class Notice:
    """Something that a person should be told: a failure, a recovery, an escalation, the run's start or end."""

    t: float
    level: Level
    text: str


@dataclass
class ReplicaState:
    """What is known of one replica.

    ``state`` is ``starting``, ``training``, ``syncing``, ``down``, ``restarting``, ``joining``, ``lost`` or
    ``finished``.
    """

    state: str = "starting"
    generation: int = 0
    step: int = 0
    host: str = ""
    failures: int = 0
    last_failure: str = ""
    joined: bool = False
    failed_at: float | None = None
    """Time of the failure (its injection, if there was one) that the replica has not recovered from."""
    failed_generation: int = -1
    injected: tuple[int, float, str] | None = None
    """Generation, time and type of the last injection."""


@dataclass
class RunState:
    """The whole run. `apply` takes an event and returns what is worth telling.

    Args:
        replicas: how many replicas the run has; they are shown before they are heard of.
    """

    replicas: dict[int, ReplicaState] = field(default_factory=dict)
    started: float | None = None
    now: float = 0.0
    step: int = 0
    tokens: float = 0.0
    train_loss: float | None = None
    eval_loss: float | None = None
    participants: int | None = None
    quorum_id: int | None = None
    failures: int = 0
    recoveries: int = 0
    syncs_lost: int = 0
    ok: bool | None = None
    _rates: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=4096))

    def tokens_per_second(self) -> float | None:
        """Return the committed tokens per second over the last `RATE_WINDOW` seconds."""
        if len(self._rates) < 2:
            return None
        (t0, tokens0), (t1, tokens1) = self._rates[0], self._rates[-1]
        return (tokens1 - tokens0) / (t1 - t0) if t1 > t0 else None

    def eta(self, budget: float) -> float | None:
        """Return the seconds until ``budget`` tokens are committed at the present rate."""
        rate = self.tokens_per_second()
        return max(0.0, budget - self.tokens) / rate if rate else None

    def apply(self, event: Any) -> list[Notice]:
        """Take one event."""
        if not isinstance(event, dict):
            return []
        t, kind = units.number(event.get("t")), event.get("kind")
        if t is None or not isinstance(kind, str):
            return []
        self.now = max(self.now, t)
        handler = getattr(self, f"_on_{kind}", None)
        if handler is None:
            return []
        replica = units.index(event.get("replica"))
        if kind not in _OF_REPLICA:
            return cast("list[Notice]", handler(t, event))
        if replica is None or replica < 0:
            return []
        state = self.replicas.setdefault(replica, ReplicaState())
        generation = units.index(event.get("generation"), state.generation)
        assert generation is not None
        if kind in TRAINER_KINDS:
            # The last events of a dead generation may come after those of the next.
            if generation < state.generation or (state.failed_generation >= generation and kind != "error"):
                return []
            state.generation = generation
        return cast("list[Notice]", handler(t, event, replica, state, generation))

    def _on_run_started(self, t: float, event: dict[str, Any]) -> list[Notice]:
        self.started, self.ok = t, None
        # If it is not the first start: what the earlier ones did is neither this one's pace nor its failures.
        self._rates.clear()
        self.step, self.tokens, self.participants, self.quorum_id = 0, 0.0, None, None
        for s in self.replicas.values():
            s.state, s.joined, s.failed_at = "starting", False, None
        hosts = event.get("hosts")
        count = len(hosts) if isinstance(hosts, (list, tuple)) else 0
        where = f" on {count} host{'s' if count > 1 else ''}" if count else ""
        return [Notice(t, "info", f"run {units.one_line(event.get('run'), 60)} started{where}")]

    def _on_run_finished(self, t: float, event: dict[str, Any]) -> list[Notice]:
        self.ok = event.get("ok") is True
        reason = units.one_line(event.get("reason"))
        how = "finished" if self.ok else "ended early"
        return [Notice(t, "good" if self.ok else "bad", f"run {how}" + (f": {reason}" if reason else ""))]

    def _on_host_lost(self, t: float, event: dict[str, Any]) -> list[Notice]:
        text = f"host {units.one_line(event.get('host'), 60)} lost"
        cause = units.one_line(event.get("cause"))
        return [Notice(t, "bad", f"{text}: {cause}" if cause else text)]

    def _on_quorum_service(self, t: float, event: dict[str, Any]) -> list[Notice]:
        cause = units.one_line(event.get("cause"))
        return [Notice(t, "warn", f"another process forms the quorums: {cause}")] if cause else []

    def _on_state_saved(self, t: float, event: dict[str, Any]) -> list[Notice]:
        return [Notice(t, "info", f"saved at sync {units.index(event.get('step'), 0)}")]

    def _on_saved(self, t: float, event: dict[str, Any], r: int, s: ReplicaState, generation: int) -> list[Notice]:
        error = units.one_line(event.get("error"))
        return [Notice(t, "warn", f"replica {r} could not save: {error}")] if error else []

    def _on_injected(self, t: float, event: dict[str, Any], r: int, s: ReplicaState, generation: int) -> list[Notice]:
        kind, rank = units.one_line(event.get("type"), 30) or "failure", units.index(event.get("rank"))
        s.injected = (generation, t, kind)
        whom = f"replica {r}" if rank is None else f"replica {r} rank {rank}"
        return [Notice(t, "warn", f"injected {kind} into {whom}")]

    def _on_detected(self, t: float, event: dict[str, Any], r: int, s: ReplicaState, generation: int) -> list[Notice]:
        if generation <= s.failed_generation or generation < s.generation or s.state == "lost":
            return []  # another rank of a replica that is known to be down
        injected = s.injected if s.injected is not None and s.injected[0] == generation else None
        s.state, s.joined, s.failed_generation = "down", False, generation
        s.generation, s.failures = max(s.generation, generation), s.failures + 1
        s.failed_at = injected[1] if injected else t
        self.failures += 1
        what = units.one_line(event.get("exit"), 60) or units.one_line(event.get("cause"), 120) or "unknown cause"
        s.last_failure = f"{injected[2]}, {what}" if injected else what
        host = units.one_line(event.get("host"), 60) or s.host
        text = f"replica {r} down" + (f" on {host}" if host else "") + f": {what}"
        cause = units.one_line(event.get("cause"), 120)
        if cause and cause not in text:
            text += f" ({cause})"
        if injected:
            text += f", seen {units.seconds(t - injected[1])} after the injection"
        return [Notice(t, "bad", text)]

    def _on_respawn(self, t: float, event: dict[str, Any], r: int, s: ReplicaState, generation: int) -> list[Notice]:
        back = s.state == "lost"  # with its host, which is back
        if s.state != "finished":
            s.state = "restarting"
        return [Notice(t, "good", f"replica {r} starts again")] if back else []

    def _on_escalated(self, t: float, event: dict[str, Any], r: int, s: ReplicaState, generation: int) -> list[Notice]:
        level, reason = units.one_line(event.get("level"), 30), units.one_line(event.get("reason"))
        return [Notice(t, "warn", f"replica {r} escalated to {level}" + (f": {reason}" if reason else ""))]

    def _on_replica_lost(
        self, t: float, event: dict[str, Any], r: int, s: ReplicaState, generation: int
    ) -> list[Notice]:
        s.state, s.joined = "lost", False
        reason = units.one_line(event.get("reason"))
        how = "lost until its host is back or replaced" if event.get("awaits_host") is True else "lost for good"
        return [Notice(t, "bad", f"replica {r} {how}" + (f": {reason}" if reason else ""))]

    def _on_error(self, t: float, event: dict[str, Any], r: int, s: ReplicaState, generation: int) -> list[Notice]:
        s.last_failure = units.one_line(event.get("error"), 120) or s.last_failure
        return []

    def _on_trainer_started(
        self, t: float, event: dict[str, Any], r: int, s: ReplicaState, generation: int
    ) -> list[Notice]:
        s.state = "joining" if generation else "starting"
        s.joined = generation == 0
        s.host = units.one_line(event.get("host"), 60) or s.host
        return []

    def _on_phase(self, t: float, event: dict[str, Any], r: int, s: ReplicaState, generation: int) -> list[Notice]:
        if s.joined:
            s.state = "syncing" if event.get("phase") == "sync" else "training"
        return []

    def _on_step(self, t: float, event: dict[str, Any], r: int, s: ReplicaState, generation: int) -> list[Notice]:
        if s.joined:
            s.state = "training"
        s.step = units.index(event.get("step"), s.step) or 0
        self.step = max(self.step, s.step)
        loss = units.number(event.get("loss"))
        if loss is not None:
            self.train_loss = (
                loss if self.train_loss is None else self.train_loss + _SMOOTHING * (loss - self.train_loss)
            )
        if not self._rates:
            self._count(t, units.number(event.get("tokens")) or 0.0)
        return []

    def _on_quorum_asked(
        self, t: float, event: dict[str, Any], r: int, s: ReplicaState, generation: int
    ) -> list[Notice]:
        if s.joined:
            s.state = "syncing"
        return []

    def _on_quorum(self, t: float, event: dict[str, Any], r: int, s: ReplicaState, generation: int) -> list[Notice]:
        self.participants = units.index(event.get("participants"), self.participants)
        self.quorum_id = units.index(event.get("quorum_id"), self.quorum_id)
        s.joined = event.get("healing") is not True
        s.state = "syncing" if s.joined else "joining"
        return []

    def _on_state_received(
        self, t: float, event: dict[str, Any], r: int, s: ReplicaState, generation: int
    ) -> list[Notice]:
        s.joined, s.state = True, "syncing"
        return []

    def _on_sync(self, t: float, event: dict[str, Any], r: int, s: ReplicaState, generation: int) -> list[Notice]:
        self.participants = units.index(event.get("participants"), self.participants)
        if event.get("committed") is not True:
            self.syncs_lost += event.get("committed") is False
            return []
        s.joined, s.state = True, "training"
        tokens = units.number(event.get("tokens"))
        if tokens is not None and tokens > self.tokens:
            self._count(t, tokens)
        if s.failed_at is None:
            return []
        took, s.failed_at = t - s.failed_at, None
        self.recoveries += 1
        where = f" on {s.host}" if s.host else ""
        return [Notice(t, "good", f"replica {r} recovered{where} after {units.seconds(took)}, generation {generation}")]

    def _on_eval(self, t: float, event: dict[str, Any], r: int, s: ReplicaState, generation: int) -> list[Notice]:
        loss = units.number(event.get("loss"))
        self.eval_loss = loss if loss is not None else self.eval_loss
        return []

    def _on_finished(self, t: float, event: dict[str, Any], r: int, s: ReplicaState, generation: int) -> list[Notice]:
        s.state = "finished"
        tokens = units.number(event.get("tokens"))
        if tokens is not None:
            self.tokens = max(self.tokens, tokens)
        return self._on_eval(t, event, r, s, generation)

    def _count(self, t: float, tokens: float) -> None:
        self.tokens = tokens
        self._rates.append((t, tokens))
        # Two entries are kept whatever their age, so that a slow run has a rate too.
        while len(self._rates) > 2 and self._rates[0][0] < t - RATE_WINDOW:
            self._rates.popleft()


_OF_REPLICA = (TRAINER_KINDS | {"injected", "detected", "respawn", "escalated", "replica_lost"}) & {
    name.removeprefix("_on_") for name in vars(RunState) if name.startswith("_on_")
}
