"""Synthetic runs for the tests of timeline, report and live view: failures as data in, a list of events out.

The run is simulated round by round: every replica computes `sync_every` inner steps, asks for a quorum, waits for those
who live (or for the Lighthouse to give up on the dead), and syncs. The constants are the expected numbers of the tests.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass, field

T0 = 1_700_000_000.0
HANG_DEADLINE = 10.0
DETECTION = 0.03
RESPAWN = 0.01  # from the detection to the supervisor's decision
START = 0.6  # from the decision to trainer_started
READY = 0.5  # from trainer_started to quorum_asked
HEARTBEAT = 0.5  # the Lighthouse leaves a silent replica out after this
TICK = 0.01
SYNC = 0.2
STEP = 0.1
EXITS = {
    "kill": "Killed(sig=9)",
    "segfault": "Killed(sig=11)",
    "exception": "Exited(code=1)",
    "hang": "Killed(sig=9)",
}
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 7, in step\nRuntimeError: injected'


@dataclass(frozen=True)
class Fail:
    replica: int
    t: float  # seconds since the start of the run
    type: str = "kill"
    rank: int = 0
    injected: bool = True
    host: bool = False  # the whole host is lost
    final: bool = False  # the replica is given up
    escalate: bool = False
    text: str = ""  # further last words on stderr


def fail_at(replica, t, type="kill", **more):  # noqa: A002 - reads as data in a test
    return Fail(replica, t, type, **more)


@dataclass
class _Replica:
    generation: int = 0
    host: str = ""
    starts: float = 0.0  # trainer_started
    free: float = 0.0  # begins to compute
    joined: bool = True
    gone: bool = False
    inner: int = 0
    asks: float = 0.0
    died: float | None = None
    release: float = 0.0  # when the Lighthouse has forgotten it


@dataclass
class Simulation:
    replicas: int = 4
    syncs: int = 12
    failures: tuple[Fail, ...] = ()
    sync_every: int = 20
    ranks: int = 1
    ok: bool = True
    seed: int = 0
    bad_state: frozenset[int] = frozenset()  # replicas whose received state differs
    step_scale: float = 1.0
    tokens_per_step: int = 512
    skew: float = 0.002  # replica r is r times this slower per step
    events: list[dict] = field(default_factory=list)

    def emit(self, kind, t, replica=None, **fields):
        e = {"kind": kind, "t": T0 + t, **fields}
        if replica is not None:
            e = {**e, "replica": replica, "generation": fields.get("generation", self.state[replica].generation)}
        self.events.append(e)

    def trainers(self, kind, t, replica, **fields):
        for rank in range(self.ranks):
            self.emit(kind, t, replica, rank=rank, **fields)

    def loss(self, tokens):
        return 1.45 + 3.1 * math.exp(-tokens / (0.22 * self.budget)) + 0.55 * math.exp(-tokens / (0.9 * self.budget))

    def run(self):
        self.rng = random.Random(self.seed)
        self.budget = self.syncs * self.replicas * self.sync_every * self.tokens_per_step * self.ranks
        hosts = [f"node{i + 1:02d}" for i in range(self.replicas)]
        self.state = {r: _Replica(host=hosts[r], starts=1.0, free=1.5) for r in range(self.replicas)}
        config = {"model": "debug", "replicas": self.replicas, "sync_every": self.sync_every, "tokens": self.budget,
                  "seq_len": 128, "batch_size": 4, "procs_per_replica": self.ranks, "lr": 2e-3}  # fmt: skip
        versions = {"monarch_slurm": "0.1.0", "torch": "2.11.0", "torchft": "0.2.0", "python": "3.11.7"}
        self.emit("run_started", 0.0, run="debug-0001", config=config, hosts=[*hosts, "node09"], versions=versions)
        self.emit("lighthouse", 0.1, address="http://10.0.0.1:29510")
        for r in self.state:
            self.trainers("trainer_started", 1.0, r, pid=4000 + r, host=hosts[r])
            self.trainers("engine_ready", 1.4, r, parameters=1_200_000, seconds=0.4)
        self.pending = sorted(self.failures, key=lambda f: f.t)
        self.tokens = self.quorum_id = self.number = 0
        members: list[int] = []
        step, now = 0, 1.5
        while step < self.syncs and any(not s.gone for s in self.state.values()):
            now, committed, members = self.round(step, members)
            step += committed
        assert not self.pending, f"these fell where nothing ran: {self.pending}"
        for r in members:
            self.trainers("finished", now + 0.05, r, tokens=self.tokens, step=step, loss=self.loss(self.tokens))
        reason = "token budget reached" if self.ok else "too few replicas for a quorum"
        self.emit("run_finished", now + 0.3, ok=self.ok, reason=reason)
        return sorted(self.events, key=lambda e: e["t"])

    def round(self, step, previous):
        """One quorum and sync; returns its end, whether it was committed, and who took part."""
        state = self.state
        for r, s in state.items():
            if s.joined and not s.gone:
                s.asks = s.free + self.sync_every * self.step_time(r)
        victims: set[int] = set()
        while True:
            living = [r for r, s in state.items() if s.joined and not s.gone and r not in victims]
            held = [state[r].release for r in victims]
            formed = max([state[r].asks for r in living] + held, default=self.last_ready()) + TICK
            hit = next((f for f in self.pending if f.t < formed and self.up(f)), None)
            if hit is None:
                break
            self.pending.remove(hit)
            if state[hit.replica].joined:
                victims.add(hit.replica)
                self.steps(hit.replica, until=hit.t)
            self.die(hit)
        joiners = [r for r, s in state.items() if not s.joined and not s.gone and s.asks < formed]
        members = sorted([*living, *joiners])
        self.quorum_id += members != previous
        for r in members:
            if r in living:
                self.steps(r, until=math.inf)
            self.trainers("phase", state[r].asks, r, phase="sync")
            self.trainers("quorum_asked", state[r].asks, r, step=step)
            self.trainers("quorum", formed, r, quorum_id=self.quorum_id, participants=len(members), step=step,
                          healing=r in joiners, seconds=formed - state[r].asks)  # fmt: skip
        hashed = hashlib.sha256(f"{self.seed}/{step}".encode()).hexdigest()
        for r in joiners:
            if living:
                self.trainers("state_sent", formed + 0.05, living[0], step=step, bytes=14_400_000, sha256=hashed, to=1)
                got = "0" * 64 if r in self.bad_state else hashed
                self.trainers("state_received", formed + 0.12, r, step=step, bytes=14_400_000, sha256=got, seconds=0.07)
        end = formed + SYNC
        broken = next((f for f in self.pending if formed <= f.t < end and f.replica in members), None)
        if broken is not None:
            self.pending.remove(broken)
        else:
            self.tokens += len(members) * self.sync_every * self.tokens_per_step * self.ranks
        for r in members:
            state[r].joined, state[r].free, state[r].died = True, end, None
            if broken is None or r != broken.replica:
                self.trainers("sync", end, r, step=step, committed=broken is None, participants=len(members),
                              tokens=self.tokens, seconds=end - state[r].asks)  # fmt: skip
                if broken is None:
                    self.trainers("eval", end + 0.02, r, step=step, tokens=self.tokens, loss=self.loss(self.tokens))
        if broken is not None:
            self.die(broken)
        return end, broken is None, [r for r in members if broken is None or r != broken.replica]

    def up(self, f):
        s = self.state[f.replica]
        return not s.gone and s.starts <= f.t

    def last_ready(self):
        return max((s.asks for s in self.state.values() if not s.gone), default=0.0)

    def step_time(self, r):
        return (STEP + r * self.skew) * self.step_scale

    def steps(self, r, until):
        s = self.state[r]
        self.trainers("phase", s.free, r, phase="compute")
        for i in range(1, self.sync_every + 1):
            t = s.free + i * self.step_time(r)
            if t > until:
                break
            s.inner += 1
            loss = self.loss(self.tokens) + self.rng.gauss(0.15, 0.3)
            self.trainers("step", t, r, step=s.inner, loss=loss, tokens=self.tokens, lr=1e-3, seconds=self.step_time(r))

    def die(self, f):
        s = self.state[f.replica]
        number = None
        if f.injected:
            self.number += 1
            number = self.number
            self.emit("injected", f.t, f.replica, failure=number, type=f.type, rank=f.rank)
        seen = f.t + (HANG_DEADLINE if f.type == "hang" else 3.0 if f.host else DETECTION)
        tail = ["INFO step 7", *(f.text.splitlines())]
        if f.host:
            self.emit("host_lost", seen, host=s.host, cause="no heartbeat for 3 s")
        cause = {"hang": "no step for 10 s", "exception": "RuntimeError: injected"}.get(f.type, "the process died")
        self.emit("detected", seen, f.replica, failure=number, cause=cause, host=s.host, proc=f"trainer_{f.rank}",
                  rank=f.rank, exit="HostLost" if f.host else EXITS[f.type], stderr_tail=tail,
                  traceback=TRACEBACK + f.text if f.type == "exception" else None)  # fmt: skip
        s.died, s.release, s.joined = f.t, seen + (0.0 if f.host else HEARTBEAT), False
        if f.final:
            s.gone = True
            self.emit("replica_lost", seen + RESPAWN, f.replica, reason="3 failures in 60 s")
            return
        if f.escalate:
            self.emit("escalated", seen + RESPAWN, f.replica, level="hosts", reason="2 mesh restarts in 30 s")
        level = "hosts" if f.host or f.escalate else "mesh"
        self.emit("respawn", seen + RESPAWN, f.replica, level=level, attempt=1)
        if f.host:
            s.host = "node09"
        s.generation += 1
        s.starts = seen + RESPAWN + START
        s.asks = s.starts + READY
        self.trainers("trainer_started", s.starts, f.replica, pid=5000 + s.generation, host=s.host)
        self.trainers("engine_ready", s.starts + 0.3, f.replica, parameters=1_200_000, seconds=0.3)


def simulate(*failures, **settings):
    return Simulation(failures=failures, **settings).run()


def eventful():
    """A run with failures of all types, a lost host, an escalation and a replica that fails while it recovers."""
    return simulate(
        fail_at(2, 7.0),
        fail_at(1, 15.1, "segfault"),
        fail_at(3, 23.0, "exception", text="\nthe last words"),
        fail_at(0, 33.0, "hang"),
        fail_at(2, 52.0, injected=False, host=True),
        fail_at(1, 62.0),
        fail_at(1, 62.9, escalate=True),
        fail_at(3, 70.0, injected=False),
        syncs=36,
    )


def two_starts(kept, pause=3600.0):
    """A run that was ended after eight syncs, and went on ``pause`` seconds later from the state of its ``kept`` th.

    The second start does six syncs more, with another token budget.
    """
    per_sync = 4 * 20 * 512
    first = [dict(e) for e in simulate(syncs=12)]
    end = next(e["t"] for e in first if e["kind"] == "sync" and e["step"] == 7) + 1.0
    first = [e for e in first if e["t"] < end]
    first.append({"kind": "run_finished", "t": end, "ok": False, "reason": "asked to end"})
    second = [dict(e) for e in simulate(syncs=6)]
    for e in second:
        e["t"] += end - T0 + pause
        for name, more in (("generation", 1), ("tokens", kept * per_sync)):
            if name in e:
                e[name] += more
        if e["kind"] in ("run_started", "sync", "eval", "finished"):
            e["step"] = e.get("step", 0) + kept
    for e in (*first, *second):
        e["step"] = e.get("step", 0) + (e["kind"] in ("sync", "eval"))  # the step that the sync has made
    second[0]["config"] = {**second[0]["config"], "tokens": (kept + 6) * per_sync}
    return first, second
