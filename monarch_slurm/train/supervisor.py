"""The supervisor of one replica: it spawns the trainers, watches them, and starts them again in place.

Failures come from three sides: a process ends (its host's agent tells), an actor raises (its process tells, traceback
included), or nothing happens any more (the watchdog tells). All lead to the same restart: the old mesh is killed and a
new one spawned, whose trainers get the state of the run from a live peer. What fails too often escalates: first the
replica's hosts get new zygotes, then the replica is given up and the manager of the run decides.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from monarch_slurm.actor import (
    Actor,
    Channel,
    FailureKind,
    HostMesh,
    MeshFailure,
    Port,
    PortReceiver,
    ProcMesh,
    SupervisionError,
    endpoint,
)
from monarch_slurm.actor.errors import format_exception
from monarch_slurm.actor.stand_ins import ASKED_FOR
from monarch_slurm.collectives import StoreActor
from monarch_slurm.controller import RestartBudget, RestartLimit
from monarch_slurm.train.config import TrainConfig
from monarch_slurm.train.events import Event, event
from monarch_slurm.train.injection import FailureActor
from monarch_slurm.train.quorum import MemberActor, QuorumActor
from monarch_slurm.train.repeated import REPEATS, RepeatedErrors
from monarch_slurm.train.saved import SavedState
from monarch_slurm.train.trainer import PulseActor, TrainerActor
from monarch_slurm.train.watchdog import Watchdog
from monarch_slurm.wire.awake_clock import AwakeClock

TRAINER_ENV: dict[str, str | None] = {"RUST_LOG": "warn", "TOKIO_WORKER_THREADS": "2"}

_WATCH_SECONDS = 0.1
"""Longest pause between two looks at the deadlines; shorter than `AwakeClock` takes for a pause of the process."""

PEER_LOST_PATIENCE = 1.0
"""Seconds that a collective may have taken when a host is known to be lost: longer, and it waits for that host."""

_PULSE_SECONDS = 0.5
"""Pause between a sign of life and the next question for one."""

STOPS_RUN = "UntrustedStateError"
"""The error of the engine that ends the whole run: a replica was to get a state that no donor has announced."""

NOT_RETRIED = (
    "ConfigError",
    "DataError",
    "NonFiniteLossError",
    "SavedStateError",
    "StateLostError",
    "UncommittedStepError",
    STOPS_RUN,
)
"""Errors of the engine that another start would only meet again."""


_HUNG = "Hung(killed)"

_EXITS = {
    FailureKind.HOST_LOST: "Lost(host)",
    FailureKind.ACTOR_ERROR: "Raised(exception)",
    FailureKind.ACTOR_ABORTED: "Aborted(actor)",
}
"""What ``detected`` events call a failure in which no process has ended by itself."""


@dataclass(frozen=True)
class RestartPolicy:
    """How often a replica may be started again at each level before the failure goes one level up.

    Attributes:
        mesh: restarts of the replica's procs.
        hosts: restarts with new zygotes on the replica's hosts.
        backoff: seconds before the second restart in a row, doubled for each further one.
    """

    mesh: RestartLimit = field(default_factory=lambda: RestartLimit(8, 300.0))
    hosts: RestartLimit = field(default_factory=lambda: RestartLimit(2, 1800.0))
    backoff: float = 0.25


@dataclass
class _Generation:
    """One start of the replica's trainers."""

    number: int
    procs: ProcMesh
    trainers: TrainerActor
    failures: FailureActor
    pulses: PulseActor
    member: MemberActor | None
    """Asks for quorums; None if TorchFT's Lighthouse forms them."""
    store: StoreActor | None
    """Where ranks meet; None if TorchFT's Lighthouse forms quorums."""
    watchdog: Watchdog
    names: frozenset[str]
    step: int = 0
    """Inner steps that its trainers have reported."""
    committed: bool = False
    """Whether they have committed a sync."""
    over: bool = False
    hopeless: str = ""
    """An error that a new start would not mend."""


class ReplicaActor(Actor):
    """Supervises one replica.

    Args:
        config: the run.
        replica: its index.
        hosts: for each replica, the hosts of its trainers.
        quorum: the actor that forms the quorums, or the address of TorchFT's Lighthouse.
        policy: how often it may restart.
        events: where the events of the replica go, its trainers' included.
        first_generation: number of the first start of the trainers; earlier ones are taken if the run continues, or if
            another supervisor of this replica has failed.
        saved: the newest saved state of the run; None if there is none.
        committed_step: committed syncs of the run so far. Trainers load ``saved`` if it is of that step, and get the
            state of a peer otherwise.
        folder: of the run.
    """

    def __init__(
        self,
        config: TrainConfig,
        replica: int,
        hosts: list[HostMesh],
        quorum: QuorumActor | str,
        policy: RestartPolicy,
        events: Port[Event],
        first_generation: int = 0,
        saved: SavedState | None = None,
        committed_step: int = 0,
        folder: str = "",
    ) -> None:
        self._saved = saved
        self._folder = folder
        self._config = config
        self._replica = replica
        self._hosts = hosts[self._replica]
        # Replicas that share hosts take consecutive GPUs there.
        self._slot = hosts[: self._replica].count(self._hosts)
        self._lighthouse = quorum if isinstance(quorum, str) else ""
        self._quorum = quorum if not isinstance(quorum, str) else None
        self._quorum_moved = asyncio.Event()
        self._clock = AwakeClock()
        self._policy = policy
        self._events = events
        self._mesh_budget = RestartBudget(policy.mesh, policy.backoff)
        self._hosts_budget = RestartBudget(policy.hosts, policy.backoff)
        self._generation: _Generation | None = None
        self._next = first_generation
        self._finished: set[int] = set()
        self._committed_step = committed_step
        self._repeated = RepeatedErrors()
        self._injected: int | None = None
        self._stopped = False
        self._cause = ""
        self._tasks: set[asyncio.Task[None]] = set()

    @endpoint
    async def start(self) -> None:
        """Spawn the trainers for the first time."""
        self._spawn()

    @endpoint
    async def inject(self, failure: int, kind: str, rank: int) -> bool:
        """Make a failure happen in a trainer; False if none is training there now.

        Args:
            failure: running number of the failure in the run's events.
        """
        generation = self._generation
        if generation is None or generation.over or self._finished or self._stopped:
            return False
        self._injected = failure
        self._emit("injected", failure=failure, type=kind, rank=rank)
        target = generation.failures.flatten("rank").slice(rank=rank)
        target.inject.broadcast(kind)
        return True

    @endpoint
    async def peer_lost(self, replica: int) -> None:
        """Tell the trainers that the host of another replica is lost, which no broken connection may ever tell them."""
        generation = self._generation
        if replica != self._replica and generation is not None and not generation.over:
            generation.pulses.peer_lost.broadcast(PEER_LOST_PATIENCE)

    @endpoint
    async def save(self, wanted: bool = True) -> None:
        """Have the trainers save their state into the run's folder, or no longer; they tell by ``saved`` events."""
        generation = self._generation
        if generation is not None and not generation.over:
            generation.pulses.save.broadcast(wanted)

    @endpoint
    async def host_is_back(self) -> None:
        """Start the replica again that was given up with its host: the host is back, or another has taken its place."""
        if self._stopped and not self._finished:
            self._stopped = False
            self._start_task(self._restart(self._next - 1, None))

    @endpoint
    async def be_patient(self, seconds: float) -> None:
        """Move all deadlines of the trainers by ``seconds``: they wait for replicas that wait for a host."""
        if self._generation is not None:
            self._generation.watchdog.extend(seconds)

    @endpoint
    async def discard_save(self, step: int) -> None:
        """Have the trainers remove what they have saved of ``step``, on every host: no run can continue from it."""
        generation = self._generation
        if generation is not None and not generation.over:
            generation.pulses.discard_save.broadcast(step)

    @endpoint
    async def quorum_moved(self, quorum: QuorumActor) -> None:
        """Another actor forms the quorums from now on, which knows nothing yet: the one before has ended."""
        self._quorum = quorum
        self._quorum_moved.set()
        generation = self._generation
        if generation is None or generation.over:
            quorum.end.broadcast(self._replica, self._next - 1)
        else:
            self._start_task(self._introduce(generation, quorum))

    async def _introduce(self, generation: _Generation, quorum: QuorumActor) -> None:
        """Register the present trainers at another quorum actor, and then have them ask there."""
        try:
            await quorum.register.call_one(self._replica, generation.number, self._committed_step)
        except SupervisionError:
            return  # it has ended, too, and the next one is about to come
        if generation.over:
            quorum.end.broadcast(self._replica, generation.number)
        elif generation.member is not None:
            generation.member.quorum_moved.broadcast(quorum)

    async def __supervise__(self, failure: MeshFailure) -> bool:
        """Restart the replica for a failure of its present trainers; failures of older ones are handled already."""
        generation = self._generation
        if generation is None or failure.mesh_name not in generation.names:
            return True
        rank = failure.crashed_ranks[0] if failure.crashed_ranks else None
        self._fail(
            generation,
            cause=_cause(failure),
            rank=rank,
            kind=failure.kind,
            exit_text=failure.exit or _EXITS.get(failure.kind, f"Failed({failure.kind})"),
            host=failure.host,
            pid=failure.pid,
            traceback=failure.traceback,
            stderr_tail=list(failure.stderr_tail),
            detected_at=failure.detected_at,
            replaced_by=failure.replaced_by,
        )
        return True

    # ---- one generation

    def _spawn(self) -> None:
        config = self._config
        number, self._next = self._next, self._next + 1
        per_host = config.procs_per_replica // len(self._hosts)
        name = f"trainer{self._replica}"
        procs = self._hosts.spawn_procs({"gpus": per_host}, name=name, env=TRAINER_ENV)
        port, receiver = Channel.open()
        trainers = procs.spawn(
            name,
            TrainerActor,
            config,
            self._replica,
            number,
            self._lighthouse,
            self._committed_step,
            self._slot * per_host,
            port,
            self._saved,
            self._folder,
        )
        failures = procs.spawn("failure", FailureActor)
        pulses = procs.spawn("pulse", PulseActor)
        meshes: list[Any] = [trainers, failures, pulses]
        member = store = None
        if self._quorum is not None:
            first = procs.flatten("rank").slice(rank=0)
            store = first.spawn("store", StoreActor)
            arguments = (self._replica, number, config.procs_per_replica, self._quorum, store)
            member = first.spawn("member", MemberActor, *arguments)
            meshes += [member, store]
        now = self._clock.tick()
        watchdog = Watchdog(config.procs_per_replica, config.step_deadline, config.sync_deadline, now)
        names = frozenset({procs._layout.mesh, *(mesh._ref.mesh for mesh in meshes)})
        generation = _Generation(number, procs, trainers, failures, pulses, member, store, watchdog, names)
        self._generation = generation
        self._start_task(self._relay(generation, receiver))
        self._start_task(self._watch(generation))
        self._start_task(self._begin(generation))
        for rank in range(config.procs_per_replica):
            self._start_task(self._feel_pulse(generation, rank))

    async def _begin(self, generation: _Generation) -> None:
        trainers = generation.trainers.flatten("rank")
        await self._register(generation)
        address, port = "127.0.0.1", 0
        if self._config.procs_per_replica > 1 and generation.store is None:
            try:
                address, port = await trainers.slice(rank=0).store_address.call_one()
            except SupervisionError:
                return  # it has ended, which __supervise__ is told
        trainers.train.broadcast(address, port, generation.member, generation.store)

    async def _register(self, generation: _Generation) -> None:
        """Have the quorum actor know the trainers before they can ask it."""
        while self._quorum is not None and not generation.over:
            quorum = self._quorum
            self._quorum_moved.clear()
            try:
                await quorum.register.call_one(self._replica, generation.number, self._committed_step)
            except SupervisionError:
                if self._quorum is quorum:
                    await self._quorum_moved.wait()
            else:
                return

    async def _relay(self, generation: _Generation, receiver: PortReceiver[Event]) -> None:
        """Hand the trainers' events on, and look at them on the way."""
        while not generation.over:
            item: Event = await receiver.recv()
            if generation.over:
                break
            generation.watchdog.take(item, self._clock.tick())
            if item["kind"] == "step":
                generation.step = max(generation.step, item["step"])
            elif item["kind"] == "sync" and item["committed"]:
                generation.committed = True
                self._committed_step = max(self._committed_step, item["step"])
            elif item["kind"] == "finished":
                self._finished.add(item["rank"])
            elif item["kind"] == "error" and item["error"].partition(":")[0] in NOT_RETRIED:
                generation.hopeless = item["error"]
            self._events.send(item)
        receiver.close()

    async def _watch(self, generation: _Generation) -> None:
        while not generation.over:
            due = generation.watchdog.due()
            if due is None:
                return
            # Not until `due`: a change of phase may bring an earlier deadline meanwhile.
            pause = min(max(0.01, due - self._clock.tick()), _WATCH_SECONDS)
            await asyncio.sleep(pause)
            hung = generation.watchdog.hung(self._clock.tick())
            if hung is not None and not generation.over:
                rank, cause = hung
                self._fail(generation, cause=f"rank {rank} hangs: {cause}", rank=rank, exit_text=_HUNG)

    async def _feel_pulse(self, generation: _Generation, rank: int) -> None:
        process = generation.pulses.flatten("rank").slice(rank=rank)
        try:
            await process.pulse.call_one()  # the first answer may wait for a zygote that still loads
            while not generation.over:
                generation.watchdog.pulse_asked(rank, self._clock.tick())
                await process.pulse.call_one()
                generation.watchdog.pulse_answered(rank)
                await asyncio.sleep(_PULSE_SECONDS)
        except SupervisionError:
            return  # it has ended, which __supervise__ is told

    def _fail(
        self,
        generation: _Generation,
        *,
        cause: str,
        rank: int | None,
        exit_text: str,
        kind: FailureKind | None = None,
        host: str | None = None,
        pid: int = 0,
        traceback: str | None = None,
        stderr_tail: list[str] | None = None,
        detected_at: float = 0.0,
        replaced_by: str = "",
    ) -> None:
        if generation.over or self._stopped:
            return
        generation.over = True
        if self._quorum is not None:
            self._quorum.end.broadcast(self._replica, generation.number)  # nobody is to wait for it
        self._cause = cause
        failure, self._injected = self._injected, None
        lost_host = kind is FailureKind.HOST_LOST
        detected = event(
            "detected",
            replica=self._replica,
            generation=generation.number,
            failure=failure,
            cause=cause,
            host=host or self._hosts.host_names[0],
            proc=f"{generation.procs._layout.mesh}.{rank if rank is not None else 0}",
            rank=rank,
            pid=pid,
            exit=exit_text,
            traceback=traceback,
            stderr_tail=stderr_tail or [],
        )
        if detected_at:
            detected["t"] = detected_at
        self._events.send(detected)
        generation.procs._kill()
        generation.procs.stop()
        if self._finished:
            return  # some ranks are done: there is nothing to start again
        if generation.hopeless:
            self._give_up(generation.hopeless)
            return
        if lost_host:
            self._emit("host_lost", host=host, cause=cause, replaced_by=replaced_by)
            if not replaced_by:
                self._give_up(f"host {host} is lost", awaits_host=True)
                return
        elif failure is None and not _is_others_fault(cause) and self._is_repeated(generation, cause, exit_text):
            return
        self._start_task(self._restart(generation.number, host if replaced_by == ASKED_FOR else None))

    def _is_repeated(self, generation: _Generation, cause: str, exit_text: str) -> bool:
        """Give the replica up if the same error has come at the same step too often; return whether it has."""
        what = cause if exit_text in (_HUNG, _EXITS[FailureKind.ACTOR_ERROR]) else f"{exit_text} {cause}".strip()
        if self._repeated.count(what, generation.step, generation.committed) < REPEATS:
            return False
        done = f"after step {generation.step}" if generation.step else "before the end of the first step"
        self._give_up(f"the same error came {REPEATS} times {done}, so another start would only meet it again: {what}")
        return True

    async def _restart(self, old: int, awaited: str | None) -> None:
        """Start the trainers again.

        Args:
            awaited: name of a lost host in whose place another one is asked for, which may take hours to come.
        """
        if awaited is not None:
            first = self._hosts.spawn_procs(name="first")
            try:
                await first.initialized
            except SupervisionError as error:
                self._give_up(f"host {awaited} is lost, and no other came: {error}", awaits_host=True)
                return
            finally:
                first.stop()
        level = "mesh"
        wait = self._mesh_budget.use(time.monotonic())
        if wait is None:
            limit = self._policy.mesh
            level, wait = "hosts", self._hosts_budget.use(time.monotonic())
            reason = f"more than {limit.restarts} restarts within {limit.within:g} s"
            self._emit("escalated", level="hosts" if wait is not None else "job", reason=reason)
            if wait is None:
                self._give_up(f"{reason}, and new zygotes on its hosts did not help; the last failure: {self._cause}")
                return
            self._hosts._renew()
        if wait:
            await asyncio.sleep(wait)
        if not self._stopped:
            self._emit("respawn", level=level, attempt=old + 1)
            self._spawn()

    def _give_up(self, reason: str, awaits_host: bool = False) -> None:
        self._stopped = True
        self._emit("replica_lost", reason=reason, awaits_host=awaits_host)

    def _emit(self, kind: str, **fields: object) -> None:
        self._events.send(event(kind, replica=self._replica, generation=max(0, self._next - 1), **fields))

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # A supervisor with a fault of its own must not go on silently: fail, and let the manager decide.
            error = task.exception()
            assert error is not None
            self._give_up(f"its supervisor failed: {error}\n{format_exception(error)}")


def _is_others_fault(cause: str) -> bool:
    """Return whether a failure tells of quorums or of other replicas, so that it may come again and again."""
    return cause.startswith("QuorumError") or "no progress in phase 'sync'" in cause


def _cause(failure: MeshFailure) -> str:
    """Return what happened in one line, without the exit and whom it happened to: the event has those."""
    if failure.traceback:
        return failure.traceback.strip().splitlines()[-1]
    first = failure.event.partition("\n")[0]
    text = first.rpartition(" failed: ")[2] or first
    return re.sub(rf"^{re.escape(failure.exit or '')} \(host [^)]*\)(; )?", "", text)
