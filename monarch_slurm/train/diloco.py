"""The training loop that all engines share: inner steps by a workload, DiLoCo syncs between them, what is told of both.

A *workload* is what one rank of a replica trains: a model, its inner optimizer and its data. The loop asks it for one
inner step after the other, and does the rest: quorums, states that joining replicas get, saves, evaluations, events.
"""

from __future__ import annotations

import math
import os
import socket
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.train import state
from monarch_slurm.train.config import Place, TrainConfig
from monarch_slurm.train.events import Event, event
from monarch_slurm.train.fault_tolerance import QuorumError, ReplicaManager, Sync, make_diloco
from monarch_slurm.train.replica import Replica
from monarch_slurm.train.saved import read_state
from monarch_slurm.train.schedule import tokens_within_sync
from monarch_slurm.train.writing import StateWriter

_EVALUATIONS = 25  # validation losses in a run without failures, about
_JOIN_ATTEMPTS = 3  # donors that may die under a joining replica before it gives up


class NonFiniteLossError(MonarchSlurmError):
    """The training loss is not a number any more: the run has diverged, or the hardware computes wrongly."""


class Workload(Protocol):
    """What one rank of a replica trains.

    Attributes:
        replica: the ranks that share the model.
        model: replicas average its parameters. They start equal on all replicas.
        optimizer: the inner one; a call of its ``step`` ends an inner step, and changes nothing without gradients.
    """

    replica: Replica
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def steps(self) -> int:
        """Inner steps that the state has done."""

    def step(self, tokens: float, computed: Callable[[float], None]) -> None:
        """Do one inner step.

        Args:
            tokens: of the whole run at the end of the step, should the present sync be committed; for the learning
                rate.
            computed: to be called with this rank's loss when the gradients are there, before the optimizer uses them.
        """

    def learning_rate(self) -> float:
        """Return that of the last step."""

    def evaluate(self) -> float | None:
        """Return the mean loss over held-out data, the same on all ranks of the replica; None if there is none."""

    def committed(self, step: int) -> None:
        """The sync that makes ``step`` has been committed: a replica that starts again goes on from here."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a joining replica is to be given: ``"model"``, ``"optimizer"``, ``"sampler"`` with ``"step"``."""

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load it. A state that was saved on disk has no ``"model"``: its parameters are loaded otherwise."""

    def close(self) -> None:
        """Close all sockets."""


def nothing() -> None:
    """Inject no failure."""


class DilocoEngine(ABC):
    """Trains one rank; what it trains is a matter of its subclasses.

    Args:
        config: the run.
        place: where this rank stands in it.
        emit: given every event, always on the thread that calls `run`.
        injected: called once in every inner step, before the optimizer's; a failure to be injected is raised from it.
    """

    def __init__(
        self,
        config: TrainConfig,
        place: Place,
        emit: Callable[[Event], None],
        injected: Callable[[], None] = nothing,
    ) -> None:
        self._config, self._place, self._injected = config, place, injected
        self._send = emit
        self._phase = ""
        self._local_step = 0
        self._participants = config.replicas
        self._joining = False
        self._step_began = 0.0
        self._loss = math.nan
        self._manager: ReplicaManager | None = None
        self._work: Workload | None = None
        self._asked_to_save = self._save_due = False
        self._writer = StateWriter(place.replica, place.rank)
        self._steps_at_sync = 0

    @abstractmethod
    def _open(self) -> Workload:
        """Build what is trained.

        Raises:
            MonarchSlurmError: the configuration or the data cannot be used.
        """

    def __repr__(self) -> str:
        where = f"replica {self._place.replica} rank {self._place.rank} generation {self._place.generation}"
        return f"<{type(self).__name__} {self._config.model}, {where}, {self._phase or 'not running'}>"

    def run(self) -> None:
        """Train until the run has committed its tokens, then evaluate; returns when every socket is closed.

        A replica that is started into a run that has committed something asks for the state before anything else.

        Raises:
            MonarchSlurmError: the configuration, the data or the run does not allow to go on; the text says why.
            Exception: whatever torch raised, or ``injected``. Every exception was emitted as an ``error`` event.
        """
        began = time.time()
        self._emit("trainer_started", t=began, pid=os.getpid(), host=socket.gethostname())
        try:
            self._build()
            self._emit(
                "engine_ready",
                parameters=sum(parameter.numel() for parameter in self._model.parameters()),
                seconds=time.time() - began,
            )
            with self._diloco:
                self._enter("compute")
                self._resume()
                if self._place.committed_step > self._step:
                    self._join()
                while self._tokens < self._config.tokens:
                    self._inner_step()
            self._finish()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self._emit("error", error=text.splitlines()[-1], traceback=traceback.format_exc())
            raise
        finally:
            self._close()

    def let_go(self, patience: float) -> bool:
        """Give up a collective with other replicas that has been waited in for ``patience`` seconds; for any thread.

        Returns:
            Whether there was one. The sync that it belongs to is lost.
        """
        return self._manager is not None and self._manager.group.let_go(patience)

    def save_soon(self, wanted: bool = True) -> None:
        """Save the state before the next inner step or while waiting for a quorum, and again after every sync from then
        on; for any thread.

        What is saved is the state as of the last committed sync: the steps since then are done again when it is loaded.
        Each save is reported by a ``saved`` event.

        Args:
            wanted: False takes the wish back.
        """
        self._asked_to_save = wanted

    def discard_save(self, step: int) -> None:
        """Remove what this rank has saved of ``step``; for any thread."""
        self._writer.discard(Path(self._place.folder), step)

    def _build(self) -> None:
        if self._config.threads > 0:
            torch.set_num_threads(self._config.threads)
        work = self._work = self._open()
        self._model, self._optimizer = work.model, work.optimizer
        self._meshes = state.meshes_of(work.model)
        manager = ReplicaManager(
            self._config,
            self._place,
            work.replica,
            self._emit,
            lambda: self._enter("sync"),
            self._meshes,
            self._save_while_waiting,
        )
        self._manager = manager
        manager.register_state_dict_fn("trainer", self._load_state, self._save_state)
        # Hooks run in the order in which they are registered: the step is reported before DiLoCo syncs after it.
        self._optimizer.register_step_post_hook(lambda *_: self._report_step())
        self._diloco = make_diloco(manager, self._model, self._optimizer, self._config)

    def _save_if_wanted(self) -> None:
        """Save if somebody has asked for it, and wait until it is done; or if it is time to, and train on meanwhile."""
        asked = self._asked_to_save and self._step > 0
        if asked and self._writer.step == self._step and not self._writer.busy:
            asked = False  # it is on the disk already
        if asked:
            self._enter("save")
        self._tell_saved(wait=asked)
        due, self._save_due = self._save_due and not self._writer.busy, False
        if (asked or due) and self._writer.step != self._step:
            self._enter("save")
            self._writer.begin(Path(self._place.folder), self._step, self._state_to_save())
            self._tell_saved(wait=asked)
        self._enter("compute")

    def _save_while_waiting(self) -> None:
        """Save if somebody has asked for it while this replica waits for a quorum, which may never form.

        Called on the thread that waits, which touches the state only after this; the trainer's thread waits for it.
        """
        if not self._asked_to_save or self._joining or self._step == 0:
            return
        if self._writer.step == self._step and not self._writer.busy:
            return
        self._enter("save")
        self._tell_saved(wait=True)
        if self._writer.step != self._step:
            self._writer.begin(Path(self._place.folder), self._step, self._state_to_save())
            self._tell_saved(wait=True)
        self._enter("sync")

    def _state_to_save(self) -> dict[str, Any]:
        assert self._manager is not None
        tree = self._manager.full_state()
        # The parameters as of the last sync are DiLoCo's; the inner optimizer's moments are as they are now.
        del tree["user"]["trainer"]["model"]
        tree["user"]["trainer"]["sampler"] = {"step": self._steps_at_sync}
        return tree

    def _tell_saved(self, wait: bool) -> None:
        told = self._writer.take(wait)
        if told is not None:
            self._emit("saved", **told)

    def _resume(self) -> None:
        """Load the state that the run goes on from, unless the other replicas are beyond it already."""
        saved = self._place.saved
        if saved is None or self._place.committed_step != saved.step:
            return
        assert self._manager is not None
        assert self._work is not None
        began = time.time()
        tree = state.restore(read_state(saved.path(self._place.rank), saved.sha256[self._place.rank]), self._meshes)
        self._manager.load_full_state(tree)
        self._diloco._restore_parameters()
        self._steps_at_sync = self._work.steps
        self._emit("loaded", step=self._step, seconds=time.time() - began)

    def _save_state(self) -> dict[str, Any]:
        assert self._manager is not None
        assert self._work is not None
        return {"trained": self._manager.trained, **self._work.state_dict()}

    def _load_state(self, saved: dict[str, Any]) -> None:
        assert self._manager is not None
        assert self._work is not None
        self._manager.trained = saved["trained"]
        self._work.load_state_dict(saved)

    @property
    def _step(self) -> int:
        """Committed syncs of the run, as this replica's state knows them."""
        assert self._manager is not None
        return int(self._manager.current_step())

    @property
    def _tokens(self) -> int:
        """Tokens that the run has committed: the same number on every replica."""
        assert self._manager is not None
        return self._manager.trained * self._config.tokens_per_sync

    def _join(self) -> None:
        """Get the state of the run at the peers' next sync.

        DiLoCo counts steps of the optimizer; without gradients a step costs nothing and changes nothing, so this takes
        a whole interval of them. The replica's change is then that of its donor, whose parameters it got.

        Raises:
            QuorumError: one donor after another died.
        """
        assert self._manager is not None
        self._joining = True
        for _ in range(_JOIN_ATTEMPTS):
            for _ in range(self._config.sync_every):
                self._optimizer.step()
            self._after_sync(self._manager.take_sync())
            if self._manager.joined:
                self._joining = False
                return
        raise QuorumError(f"replica {self._place.replica} tried {_JOIN_ATTEMPTS} times to get the state of a peer")

    def _inner_step(self) -> None:
        assert self._manager is not None
        assert self._work is not None
        self._save_if_wanted()
        self._step_began = time.time()
        self._local_step += 1
        self._work.step(self._expected_tokens(), self._computed)
        self._after_sync(self._manager.take_sync())
        self._manager.report_transfers()

    def _computed(self, loss: float) -> None:
        """Look at the loss of a step before the optimizer can carry it into the parameters, and the sync to others."""
        assert self._work is not None
        self._injected()
        self._loss = loss
        if not math.isfinite(loss):
            raise NonFiniteLossError(f"the training loss of step {self._work.steps} is {loss}")

    def _expected_tokens(self) -> float:
        return tokens_within_sync(self._tokens, self._local_step, self._participants, self._config)

    def _report_step(self) -> None:
        assert self._work is not None
        if self._joining:
            return
        self._emit(
            "step",
            step=self._work.steps,
            loss=self._loss,
            tokens=self._tokens,
            lr=self._work.learning_rate(),
            seconds=time.time() - self._step_began,
        )

    def _after_sync(self, sync: Sync | None) -> None:
        if sync is None:
            return
        assert self._manager is not None
        assert self._work is not None
        step = int(self._manager.current_step())
        self._emit(
            "sync",
            step=step,
            committed=sync.committed,
            participants=sync.participants,
            tokens=self._tokens,
            seconds=sync.seconds,
        )
        self._local_step, self._participants = 0, sync.participants
        if sync.committed:
            self._steps_at_sync = self._work.steps
            self._work.committed(step)
        if self._tokens >= self._config.tokens:
            return
        if sync.committed:
            # All replicas hold the same parameters now; one of them evaluates, and the next sync waits for it.
            interval = self._config.tokens_per_sync * self._config.replicas * _EVALUATIONS
            due = step % math.ceil(self._config.tokens / interval) == 0
            first = self._manager.participating_rank() == 0
            if due and first:
                self._evaluate(step)
            # All ranks of one replica save, and what they hold is of the same sync.
            self._save_due = first and self._config.save_every > 0 and step % self._config.save_every == 0
        self._enter("compute")

    def _evaluate(self, step: int) -> float | None:
        """Return the validation loss, and tell it."""
        assert self._manager is not None
        assert self._work is not None
        self._enter("eval")
        loss = self._work.evaluate()
        # All replicas evaluate at the end, and get the same: one tells.
        if loss is not None and self._place.rank == 0 and self._manager.participating_rank() == 0:
            self._emit("eval", step=step, tokens=self._tokens, loss=loss)
        return loss

    def _finish(self) -> None:
        assert self._manager is not None
        step = int(self._manager.current_step())
        loss = self._evaluate(step)
        self._manager.report_transfers(wait=True)
        verified = self._config.verify_state
        parameters = {name: parameter.detach() for name, parameter in self._model.named_parameters()}
        sha256 = state.digest(parameters) if verified else None
        self._emit("finished", tokens=self._tokens, step=step, loss=loss, sha256=sha256)

    def _close(self) -> None:
        if self._manager is not None:
            self._manager.close()
        if self._work is not None:
            self._work.close()

    def _enter(self, phase: str) -> None:
        if phase != self._phase:
            self._phase = phase
            self._emit("phase", phase=phase)

    def _emit(self, kind: str, *, t: float | None = None, **fields: Any) -> None:
        place = self._place
        stamped = event(kind, replica=place.replica, generation=place.generation, rank=place.rank, **fields)
        if t is not None:
            stamped["t"] = t
        self._send(stamped)
