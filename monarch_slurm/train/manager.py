"""The manager of a run: it spawns the Lighthouse and one supervisor per replica, and sees the run through.

It is the controller's program, on the head node. It does no training; it takes events, writes them to the journal,
shows them, injects failures by schedule, and decides when the run is over.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import monarch_slurm.actor as public
from monarch_slurm._version import __version__
from monarch_slurm.actor import Channel, Future, HostMesh, MeshFailure, PortReceiver, this_host
from monarch_slurm.controller import Journal
from monarch_slurm.errors import ConfigError, MonarchSlurmError
from monarch_slurm.job.notice import notice_reason
from monarch_slurm.train.config import TrainConfig
from monarch_slurm.train.events import Event, event
from monarch_slurm.train.injection import Injection
from monarch_slurm.train.saved import SavedState, SavedStateError, mark_saved, remove_unused
from monarch_slurm.train.saving import Saving
from monarch_slurm.train.supervisor import TRAINER_ENV, ReplicaActor, RestartPolicy
from monarch_slurm.train.trainer import LighthouseActor

logger = logging.getLogger(__name__)

JOURNAL = "journal.jsonl"

START_TIMEOUT = 120.0
"""Seconds for the Lighthouse and the supervisors to start, imports included."""

_TICK = 0.25
"""Seconds between two looks at the schedule while nothing happens."""

_FINISH_GRACE = 60.0
"""Seconds that the other replicas may take to finish after the first has."""


class RunFailedError(MonarchSlurmError):
    """The run has ended before its tokens were trained; the report has the whole story."""


@dataclass
class _ReplicaState:
    training: bool = False
    finished: set[int] = field(default_factory=set)
    lost: bool = False
    generation: int = 0


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
        self._supervisors: Any = None

    def run(self) -> list[Event]:
        """Train to the end and return all events.

        Raises:
            RunFailedError: the run could not be finished; `events` holds what happened.
            KeyboardInterrupt: it was interrupted; everything that it spawned is stopped.
        """
        hook, public.unhandled_fault_hook = public.unhandled_fault_hook, self._take_fault
        meshes: list[Any] = []
        self._remove_unused()
        ok, reason = False, "interrupted"
        try:
            receiver = self._start(meshes)
            self._follow(receiver)
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
            self._save_wanted.set()
            self._save_over.wait()

    def _start(self, meshes: list[Any]) -> PortReceiver[Event]:
        config = self._config
        home = this_host() if self._hosts is None else self._hosts.flatten("hosts").slice(hosts=0)
        shares = share_hosts(home if self._hosts is None else self._hosts, config)
        lighthouse_procs = home.spawn_procs(name="lighthouse", env=TRAINER_ENV)
        supervisor_procs = home.spawn_procs({"replicas": config.replicas}, name="replica")
        meshes += [lighthouse_procs, supervisor_procs]
        lighthouse = lighthouse_procs.spawn("lighthouse", LighthouseActor, config)
        url = _started(lighthouse.start.call_one(), "the Lighthouse", home)
        versions = _started(lighthouse.versions.call_one(), "the Lighthouse", home)
        names = sorted({name for share in shares for name in share.host_names})
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
        self._take(event("lighthouse", address=url))
        port, receiver = Channel.open()
        arguments = (config, shares, url, self._policy, port, self._first_generation, self._saved, str(self._folder))
        self._supervisors = supervisor_procs.spawn("replica", ReplicaActor, *arguments)
        _started(self._supervisors.start.call(), "the supervisors of the replicas", home)
        return receiver

    def _follow(self, receiver: PortReceiver[Event]) -> None:
        arriving = receiver.recv()
        self._following = True
        while not self._over():
            self._check_faults()
            self._save_due()
            self._inject_due()
            try:
                item = arriving.get(_TICK)
            except TimeoutError:
                continue
            arriving = receiver.recv()
            self._take(item)

    def _save_due(self) -> None:
        if not self._save_wanted.is_set() or self._save_over.is_set():
            return
        if self._wanted_step is None:
            self._wanted_step = self._committed
        if self._saved is not None and self._saved.step >= self._wanted_step:
            self._save_over.set()
            return
        training = [i for i, replica in enumerate(self._replicas) if replica.training and not replica.lost]
        replica = self._saving.next_replica(training, time.monotonic())
        if replica is not None:
            self._supervisors.slice(replicas=replica).save.broadcast()
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
        if self._supervisors is not None:
            self._supervisors.slice(replicas=replica).discard_save.broadcast(step)

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
            self._saving.lost(item["replica"])
            if kind == "detected":
                self._remove_unused(item["replica"])
        elif kind == "finished":
            state.finished.add(item["rank"])
            self._first_finished = self._first_finished or time.monotonic()
        elif kind == "host_lost":
            self._supervisors.peer_lost.broadcast(item["replica"])
        elif kind == "replica_lost":
            state.lost = True
            state.training = False
            living = sum(not replica.lost for replica in self._replicas)
            if living < self._config.min_replicas:
                raise RunFailedError(
                    f"{living} of {len(self._replicas)} replicas are left, and a quorum needs "
                    f"{self._config.min_replicas}; the last one was lost because {item['reason']}"
                )

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
        try:
            failure = self._faults.get_nowait()
        except queue.Empty:
            return
        raise RunFailedError(
            f"the run's own actors failed, which nothing supervises but the run itself: {failure.report()}"
        )

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
        self._supervisors.slice(replicas=target).inject.call_one(self._failures, planned.kind, planned.rank)

    def _pick_target(self, replica: int) -> int | None:
        """Return ``replica``, or the next one that is training: a failure of what is down would tell nothing."""
        count = len(self._replicas)
        training = [i for i, state in enumerate(self._replicas) if state.training and not state.lost]
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
