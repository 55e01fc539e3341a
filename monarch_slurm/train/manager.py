"""The manager of a run: it spawns who forms the quorums and one supervisor per replica, and sees the run through.

It is the controller's program, on the head node. It does no training; it takes events, writes them to the journal,
shows them, injects failures by schedule, and decides when the run is over.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import monarch_slurm.actor as public
from monarch_slurm._version import __version__
from monarch_slurm.actor import Channel, Future, HostMesh, MeshFailure, Port, PortReceiver, this_host
from monarch_slurm.actor.client import client
from monarch_slurm.controller import Journal, RestartBudget, RestartLimit
from monarch_slurm.errors import ConfigError, MonarchSlurmError
from monarch_slurm.job.notice import notice_reason
from monarch_slurm.train.config import TORCHFT, TrainConfig
from monarch_slurm.train.events import Event, event
from monarch_slurm.train.injection import Injection
from monarch_slurm.train.native_modules import build_on_hosts
from monarch_slurm.train.quorum import QuorumActor
from monarch_slurm.train.saved import SavedState, SavedStateError, mark_saved, remove_unused
from monarch_slurm.train.saving import Saving
from monarch_slurm.train.supervisor import STOPS_RUN, TRAINER_ENV, ReplicaActor, RestartPolicy
from monarch_slurm.train.trainer import LighthouseActor

logger = logging.getLogger(__name__)

JOURNAL = "journal.jsonl"

START_TIMEOUT = 300.0
"""Seconds for whoever forms the quorums and for the supervisors to start, imports included."""

_TICK = 0.25
"""Seconds between two looks at the schedule while nothing happens."""

_PATIENCE_TICK = 5.0
"""Seconds by which deadlines are moved at a time while the run waits for a host."""

_FINISH_GRACE = 60.0
"""Seconds that the other replicas may take to finish after the first has."""


HOST_RETURN_SECONDS = 60.0
"""Seconds that a run with too few replicas waits for a lost host to come back, or for another in its place."""

LAST_SAVE_SECONDS = 120.0
"""Seconds that a run that fails takes to save what its replicas hold."""

SUPERVISOR_LIMIT = RestartLimit(3, 300.0)
"""How often the supervisor of a replica may be started again."""

QUORUM_LIMIT = RestartLimit(8, 300.0)
"""How often the actor that forms the quorums may be started again."""

_SECRET_BYTES = 32


class RunFailedError(MonarchSlurmError):
    """The run has ended before its tokens were trained; the report has the whole story."""


@dataclass
class _ReplicaState:
    """What the manager knows of a replica.

    Attributes:
        training: it holds the state of the run.
        lost: it was given up.
        awaits_host: it was given up with its host, and starts again if that comes back or another takes its place.
        supervisor: the actor; None if it has failed and was not needed any more.
        names: the meshes of the supervisor.
        supervisors: how often the supervisor may still be started again.
    """

    training: bool = False
    finished: set[int] = field(default_factory=set)
    lost: bool = False
    awaits_host: bool = False
    generation: int = 0
    supervisor: Any = None
    names: frozenset[str] = frozenset()
    supervisors: RestartBudget = field(default_factory=lambda: RestartBudget(SUPERVISOR_LIMIT))


class Run:
    """One training run, from spawn to end.

    Args:
        config: what to train.
        folder: where the journal goes.
        hosts: the hosts to train on; None is this machine.
        policy: how often replicas may restart.
        injections: failures to inject, by time since all replicas began to train.
        watch: called with every event, on the caller's thread.
        saved: the state that the run goes on from; None begins anew.
        history: events of earlier starts of this run.
        inputs: digests of what the run reads (`monarch_slurm.train.inputs`), which are stored with each saved state.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        hosts: HostMesh | None = None,
        policy: RestartPolicy | None = None,
        injections: Iterator[Injection] | None = None,
        watch: Callable[[Event], None] = lambda event: None,
        saved: SavedState | None = None,
        history: Sequence[Event] = (),
        inputs: Mapping[str, str] | None = None,
    ) -> None:
        self._config = config
        self._hosts = hosts
        self._policy = policy or RestartPolicy()
        self._injections = injections or iter(())
        self._next_injection = next(self._injections, None)
        self._watch = watch
        self._folder = folder.absolute()
        self._journal = Journal(folder / JOURNAL)
        self.events: list[Event] = list(history)
        self._saved = saved
        self._first_generation = max((e["generation"] + 1 for e in history if "generation" in e), default=0)
        self._replicas = [_ReplicaState(generation=self._first_generation) for _ in range(config.replicas)]
        self._saving = Saving(str(self._folder), config.procs_per_replica, tuple((inputs or {}).items()))
        self._committed = 0 if saved is None else saved.step
        self._wanted_step: int | None = None
        self._save_wanted, self._save_over = threading.Event(), threading.Event()
        self._following = False
        self._faults: queue.SimpleQueue[MeshFailure] = queue.SimpleQueue()
        self._began: float | None = None
        self._first_finished: float | None = None
        self._failures = max((e["failure"] for e in history if e["kind"] == "injected"), default=0)
        self._enough = ""
        self._meshes: list[Any] = []
        self._home: HostMesh | None = None
        self._shares: list[HostMesh] = []
        self._quorum: Any = None
        """The actor that forms the quorums, or the address of TorchFT's Lighthouse."""
        self._quorum_mesh = ""
        self._quorum_epoch = sum(e["kind"] == "quorum_service" for e in history)
        self._quorum_starts = RestartBudget(QUORUM_LIMIT)
        self._quorum_secret = secrets.token_bytes(_SECRET_BYTES)
        self._port: Port[Event] | None = None
        self._receiver: PortReceiver[Event]
        self._arriving: Future[Event]
        self._old_supervisors: set[str] = set()
        self._too_few: tuple[float, str] | None = None
        """Since when too few replicas are left while a host may come back, and why."""
        self._patience_at = 0.0
        self._failed = False

    def run(self) -> list[Event]:
        """Train to the end and return all events.

        Raises:
            RunFailedError: the run could not be finished; `events` holds what happened.
            KeyboardInterrupt: it was interrupted; everything that it spawned is stopped.
        """
        hook, public.unhandled_fault_hook = public.unhandled_fault_hook, self._take_fault
        meshes = self._meshes
        self._remove_unused()
        ok, reason = False, "interrupted"
        try:
            self._start()
            try:
                self._follow()
            except RunFailedError as error:
                raise RunFailedError(f"{error}; {self._save_before_the_end()}") from error
            ok, reason = True, self._enough or "all tokens trained"
        except MonarchSlurmError as error:
            reason = str(error)
            raise
        except SystemExit:  # of `save_on_notice`
            cause = notice_reason()
            reason = f"asked to end{f' ({cause})' if cause else ''}; " + (
                "nothing was saved" if self._saved is None else f"saved at sync {self._saved.step}"
            )
            raise
        finally:
            self._following = False
            self._save_over.set()
            public.unhandled_fault_hook = hook
            for mesh in reversed(meshes):
                mesh.stop()
            for mesh in meshes:
                mesh.stop().exception(timeout=30.0)
            self._remove_unused()
            self._take(event("run_finished", ok=ok, reason=reason))
            self._journal.close()
        return self.events

    def _take_fault(self, failure: MeshFailure) -> None:
        self._faults.put(failure)

    def stop(self, reason: str) -> None:
        """End the run before its tokens are trained, as a success; for benchmarks. From `watch` or another thread."""
        self._enough = reason

    def save(self) -> None:
        """Save the state of the run, and return when it is on the disk. For any other thread than that of `run`.

        Returns at once when no replica holds a state that would be worth it: the run then goes on from the one before.
        """
        if self._following:
            self._want_save()
            while self._following and not self._save_over.wait(_TICK):
                pass

    def _start(self) -> None:
        config = self._config
        home = this_host() if self._hosts is None else self._hosts.flatten("hosts").slice(hosts=0)
        self._home, self._shares = home, share_hosts(home if self._hosts is None else self._hosts, config)
        if config.replica_backend == "ccl":
            build_on_hosts(home if self._hosts is None else self._hosts)
        self._port, self._receiver = Channel.open()
        versions = self._start_lighthouse() if config.lighthouse else self._start_quorum()
        names = sorted({name for share in self._shares for name in share.host_names})
        versions["monarch_slurm"] = __version__
        self._take(
            event(
                "run_started",
                run=self._journal.path.parent.name,
                config=config.to_dict(),
                hosts=names,
                versions=versions,
                step=0 if self._saved is None else self._saved.step,
                job=os.environ.get("SLURM_JOB_ID"),
            )
        )
        if config.lighthouse:
            self._take(event("lighthouse", address=self._quorum))
        else:
            self._take(event("quorum_service", epoch=self._quorum_epoch))
        started = [self._start_supervisor(replica, self._first_generation) for replica in range(config.replicas)]
        for future in started:
            _started(future, "the supervisors of the replicas", home)

    def _start_lighthouse(self) -> dict[str, str]:
        """Start TorchFT's Lighthouse, or take the one that is named; return the versions of what trains."""
        assert self._home is not None
        procs = self._home.spawn_procs(name="lighthouse", env=TRAINER_ENV)
        self._meshes.append(procs)
        lighthouse = procs.spawn("lighthouse", LighthouseActor, self._config)
        self._quorum = self._config.lighthouse
        if self._quorum == TORCHFT:
            self._quorum = _started(lighthouse.start.call_one(), "the Lighthouse", self._home)
        versions: dict[str, str] = _started(lighthouse.versions.call_one(), "the Lighthouse", self._home)
        return versions

    def _start_quorum(self) -> dict[str, str]:
        """Start the actor that forms the quorums; return the versions of what trains."""
        assert self._home is not None
        self._spawn_quorum()
        versions: dict[str, str] = _started(
            self._quorum.versions.call_one(), "the actor that forms the quorums", self._home
        )
        return versions

    def _spawn_quorum(self) -> None:
        assert self._home is not None
        procs = self._home.spawn_procs(name="quorum")
        self._meshes.append(procs)
        arguments = (self._config, self._quorum_epoch, self._committed, self._quorum_secret, self._port)
        self._quorum = procs.spawn("quorum", QuorumActor, *arguments)
        self._quorum_mesh = self._quorum._ref.mesh

    def _quorum_failed(self, failure: MeshFailure) -> None:
        """Start the actor again that forms the quorums; supervisors and members report to it what they know.

        Raises:
            RunFailedError: it fails too often.
        """
        what = failure.event.partition("\n")[0]
        if self._quorum_starts.use(time.monotonic()) is None:
            raise RunFailedError(
                f"the actor that forms the quorums failed more than {QUORUM_LIMIT.restarts} times within"
                f" {QUORUM_LIMIT.within:g} s; the last time: {what}"
            )
        self._quorum_epoch += 1
        self._spawn_quorum()
        self._tell(lambda supervisor: supervisor.quorum_moved.broadcast(self._quorum))
        for replica, state in enumerate(self._replicas):
            if state.supervisor is None:
                self._quorum.end.broadcast(replica, state.generation)
        self._take(event("quorum_service", epoch=self._quorum_epoch, cause=what))

    def _start_supervisor(self, replica: int, generation: int) -> Future[Any]:
        """Start the supervisor of ``replica``, which starts the trainers as ``generation``."""
        assert self._home is not None
        state, name = self._replicas[replica], f"replica{replica}"
        procs = self._home.spawn_procs(name=name)
        self._meshes.append(procs)
        arguments = (self._config, replica, self._shares, self._quorum, self._policy, self._port, generation)
        actor: Any = procs.spawn(name, ReplicaActor, *arguments, self._saved, self._committed, str(self._folder))
        state.supervisor, state.names = actor, frozenset({procs._layout.mesh, actor._ref.mesh})
        started: Future[Any] = actor.start.call_one()
        return started

    def _follow(self) -> None:
        self._arriving = self._receiver.recv()
        self._following = True
        while not self._over():
            self._check_faults()
            self._save_due()
            self._inject_due()
            self._see_to_lost_hosts()
            self._take_next()

    def _take_next(self) -> None:
        """Take the next event, if one comes soon."""
        try:
            item = self._arriving.get(_TICK)
        except TimeoutError:
            return
        self._arriving = self._receiver.recv()
        self._take(item)

    def _save_before_the_end(self) -> str:
        """Have a replica save what it holds, for the run cannot continue; say what came of it."""
        self._failed = True
        self._want_save()
        deadline = time.monotonic() + LAST_SAVE_SECONDS
        while not self._save_over.is_set() and time.monotonic() < deadline:
            self._save_due()
            self._take_next()
        if self._saved is None:
            return "nothing was saved"
        return f"its newest saved state is of sync {self._saved.step}"

    def _want_save(self) -> None:
        self._wanted_step = None
        self._save_over.clear()
        self._save_wanted.set()

    def _see_to_lost_hosts(self) -> None:
        """Start replicas again whose hosts are back, or were replaced; and end the run if too few are left for long."""
        waiting = [replica for replica, state in enumerate(self._replicas) if state.awaits_host]
        if waiting:
            here = client()
            with here.hosts_changed:
                joined = {info.host for info in here.joined}
            for replica in waiting:
                if joined.issuperset(self._shares[replica]._now_at()):
                    self._replicas[replica].awaits_host = False
                    logger.warning("replica %d starts again: the place of its lost host is taken", replica)
                    self._start_again(replica)
        if self._too_few is None:
            return
        since, why = self._too_few
        now = time.monotonic()
        if self._living() >= self._config.min_replicas:
            self._too_few = None
            self._stop_saving()
        elif now - since > HOST_RETURN_SECONDS:
            raise RunFailedError(f"{why}; no host has taken its place within {HOST_RETURN_SECONDS:g} s")
        elif now >= self._patience_at:
            self._patience_at = now + _PATIENCE_TICK
            self._tell(lambda supervisor: supervisor.be_patient.broadcast(_PATIENCE_TICK))

    def _start_again(self, replica: int) -> None:
        state = self._replicas[replica]
        if state.supervisor is not None:
            state.supervisor.host_is_back.broadcast()
            return
        self._take(event("respawn", replica=replica, generation=state.generation, level="hosts", attempt=1))
        self._start_supervisor(replica, state.generation + 1)

    def _tell(self, what: Callable[[Any], None]) -> None:
        for state in self._replicas:
            if state.supervisor is not None and not state.lost:
                what(state.supervisor)

    def _living(self) -> int:
        return sum(not state.lost for state in self._replicas)

    def _stop_saving(self) -> None:
        """The run continues: whoever was asked to save after every sync need not any more."""
        self._save_wanted.clear()
        self._saving.forget_wishes()
        self._tell(lambda supervisor: supervisor.save.broadcast(False))

    def _save_due(self) -> None:
        if not self._save_wanted.is_set() or self._save_over.is_set():
            return
        wanted = self._wanted_step = self._committed if self._wanted_step is None else self._wanted_step
        if wanted == 0 or (self._saved is not None and self._saved.step >= wanted):  # 0: nothing is committed yet
            self._save_over.set()
            return
        training = [
            i
            for i, state in enumerate(self._replicas)
            if state.training and not state.lost and state.supervisor is not None
        ]
        replica = self._saving.next_replica(training, time.monotonic())
        if replica is not None:
            self._replicas[replica].supervisor.save.broadcast()
        elif self._saving.is_hopeless(training, time.monotonic()):
            self._save_over.set()

    def _take_saved(self, item: Event) -> None:
        if "error" in item:
            self._discard_save(item["replica"], item["step"])
            return
        whole = self._saving.take(item)
        if whole is None:
            return
        if self._saved is not None and whole.step <= self._saved.step:
            if (whole.step, whole.replica) != (self._saved.step, self._saved.replica):
                self._discard_save(whole.replica, whole.step)  # another replica was first
            return
        missing = whole.missing()
        if missing is not None:
            logger.warning(
                "the run cannot continue from the state of sync %d: %s is not seen here as replica %d has written it; "
                "the run's folder must be on a file system that all hosts share",
                whole.step, missing, whole.replica,
            )  # fmt: skip
            self._discard_save(whole.replica, whole.step)
            return
        try:
            mark_saved(whole, self._config.keep_saves)
        except SavedStateError as error:  # the run continues, and the states that were saved before stay
            logger.warning("%s", error)
            self._discard_save(whole.replica, whole.step)
            return
        self._saved = whole
        self._take(event("state_saved", step=whole.step))

    def _discard_save(self, replica: int, step: int) -> None:
        """Remove what the ranks of ``replica`` have saved of ``step``, which nobody can continue from."""
        supervisor = self._replicas[replica].supervisor
        if supervisor is not None:
            supervisor.discard_save.broadcast(step)

    def _remove_unused(self, replica: int | None = None) -> None:
        """Remove saved files that are of no use; those of processes that have ended in the middle of a save."""
        try:
            remove_unused(self._folder, replica)
        except SavedStateError as error:
            logger.warning("%s", error)

    def _take(self, item: Event) -> None:
        self.events.append(item)
        kind = item["kind"]
        if kind not in ("step", "phase"):
            self._journal.write(item, sync=kind in ("injected", "detected", "state_saved", "run_finished"))
        self._note(item)
        self._watch(item)

    def _note(self, item: Event) -> None:
        kind = item["kind"]
        if "replica" not in item:
            return
        state = self._replicas[item["replica"]]
        state.generation = max(state.generation, item["generation"])
        if item["generation"] < state.generation:
            return
        if kind == "saved":
            self._take_saved(item)
        elif kind == "loaded":
            state.training = True  # it holds a state that is worth being saved
        elif kind == "sync" and item["committed"]:
            state.training = True
            self._committed = max(self._committed, item["step"])
            if self._began is None and all(replica.training for replica in self._replicas):
                self._began = time.monotonic()
        elif kind in ("detected", "respawn"):
            state.training = False
            if kind == "respawn":
                state.lost = False  # perhaps it was, with its host
            self._saving.lost(item["replica"])
            if kind == "detected":
                self._remove_unused(item["replica"])
        elif kind == "finished":
            state.finished.add(item["rank"])
            self._first_finished = self._first_finished or time.monotonic()
        elif kind == "error" and item["error"].partition(":")[0] == STOPS_RUN and not self._failed:
            raise RunFailedError(f"replica {item['replica']} refused a state, and the run was stopped: {item['error']}")
        elif kind == "host_lost":
            self._tell(lambda supervisor: supervisor.peer_lost.broadcast(item["replica"]))
        elif kind == "quorum_refused":
            raise RunFailedError(f"the run was stopped: {item['error']}")
        elif kind == "replica_lost":
            state.lost = True
            state.training = False
            state.awaits_host = item.get("awaits_host", False)
            self._check_enough(item["reason"])

    def _check_enough(self, reason: str) -> None:
        """Make sure that enough replicas are left for a quorum, or may come back; the last one was lost for ``reason``.

        Raises:
            RunFailedError: too few are left.
        """
        living = self._living()
        if living >= self._config.min_replicas or self._failed:
            return
        why = (
            f"{living} of {len(self._replicas)} replicas are left, and a quorum needs {self._config.min_replicas}; the "
            f"last one was lost because {reason}"
        )
        if living + sum(state.awaits_host for state in self._replicas) < self._config.min_replicas:
            raise RunFailedError(why)
        if self._too_few is None:
            logger.warning("%s; waiting %g s for a host to come back", why, HOST_RETURN_SECONDS)
            self._too_few = time.monotonic(), why
            self._want_save()

    def _over(self) -> bool:
        if self._enough:
            return True
        if self._first_finished is None:
            return False
        ranks = self._config.procs_per_replica
        # A replica that is being restarted now would find nobody to get the state from: the run does not wait for it.
        waiting = [
            replica
            for replica in self._replicas
            if replica.training and not replica.lost and len(replica.finished) < ranks
        ]
        if not any(len(replica.finished) == ranks for replica in self._replicas):
            return False
        return not waiting or time.monotonic() - self._first_finished > _FINISH_GRACE

    def _check_faults(self) -> None:
        """Look at failures of the run's own actors, which nothing but the run itself supervises.

        Raises:
            RunFailedError: the run cannot continue.
        """
        try:
            failure = self._faults.get_nowait()
        except queue.Empty:
            return
        for replica, state in enumerate(self._replicas):
            if failure.mesh_name in state.names:
                self._old_supervisors |= state.names
                state.names, state.supervisor = frozenset(), None
                self._supervisor_failed(replica, state, failure)
                return
        if failure.mesh_name == self._quorum_mesh:
            self._quorum_failed(failure)
        elif failure.mesh_name not in self._old_supervisors:
            raise RunFailedError(f"the run cannot continue without one of its own actors: {failure.report()}")

    def _supervisor_failed(self, replica: int, state: _ReplicaState, failure: MeshFailure) -> None:
        """Start the supervisor of a replica again, and with it the trainers, which have ended with their owner."""
        if state.lost or len(state.finished) == self._config.procs_per_replica:
            logger.warning("the supervisor of replica %d, which has nothing left to do, has failed", replica)
            return
        if not isinstance(self._quorum, str):
            self._quorum.end.broadcast(replica, state.generation)  # nobody is to wait for it
        fields: dict[str, Any] = {"replica": replica, "generation": state.generation}
        cause = f"its supervisor failed, and its trainers ended with it: {failure.event.partition(chr(10))[0]}"
        self._take(
            event(
                "detected",
                failure=None,
                cause=cause,
                host=failure.host,
                proc=failure.mesh_name,
                rank=None,
                exit=failure.exit or f"Failed({failure.kind})",
                traceback=failure.traceback,
                stderr_tail=list(failure.stderr_tail),
                **fields,
            )
        )
        if state.supervisors.use(time.monotonic()) is None:
            limit = f"{SUPERVISOR_LIMIT.restarts} times within {SUPERVISOR_LIMIT.within:g} s"
            self._take(event("replica_lost", reason=f"its supervisor failed more than {limit}", **fields))
            return
        self._take(event("respawn", level="supervisor", attempt=state.generation + 1, **fields))
        self._start_supervisor(replica, state.generation + 1)

    def _inject_due(self) -> None:
        planned = self._next_injection
        if planned is None or self._began is None or self._first_finished is not None:
            return
        if time.monotonic() - self._began < planned.at:
            return
        self._next_injection = next(self._injections, None)
        target = self._pick_target(planned.replica)
        if target is None:
            return
        self._failures += 1
        self._replicas[target].supervisor.inject.call_one(self._failures, planned.kind, planned.rank)

    def _pick_target(self, replica: int) -> int | None:
        """Return ``replica``, or the next one that is training: a failure of what is down would tell nothing."""
        count = len(self._replicas)
        training = [i for i, state in enumerate(self._replicas) if state.training and state.supervisor is not None]
        if len(training) <= self._config.min_replicas:
            return None  # one less would stop the run, which is not what is to be shown
        return min(training, key=lambda i: (i - replica) % count)


def _started(future: Future[Any], what: str, home: HostMesh) -> Any:
    try:
        return future.get(START_TIMEOUT)
    except TimeoutError:
        where = home.host_names[0]
        raise RunFailedError(
            f"{what} did not start on host {where} within {START_TIMEOUT:g} s; look at the logs in the run's folder"
        ) from None


def share_hosts(hosts: HostMesh, config: TrainConfig) -> list[HostMesh]:
    """Return the hosts of each replica: consecutive ones, or hosts in turn when there are more replicas than hosts.

    Raises:
        ConfigError: the procs of a replica cannot be spread evenly over its hosts.
    """
    flat = hosts.flatten("hosts")
    count = len(flat)
    if count < config.replicas:
        return [flat.slice(hosts=slice(r % count, r % count + 1)) for r in range(config.replicas)]
    per = count // config.replicas
    if config.procs_per_replica % per:
        raise ConfigError(
            f"{config.procs_per_replica} procs per replica cannot be spread evenly over the {per} hosts of each "
            f"replica: give a multiple of {per}, or more replicas"
        )
    return [flat.slice(hosts=slice(r * per, (r + 1) * per)) for r in range(config.replicas)]
