"""The built-in engine: trains a Llama on text, fault-tolerantly, as one rank of one replica.

An *engine* is what a trainer process runs: built from the run's description and its place in it, it trains until the
run has committed its tokens, tells what happens as events, and raises when it cannot go on. Whoever started the process
decides what to do about that.
"""

from __future__ import annotations

import math
import os
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.train import state
from monarch_slurm.train.config import Place, TrainConfig
from monarch_slurm.train.data import Sampler, load_corpus, split_corpus
from monarch_slurm.train.events import Event, event
from monarch_slurm.train.fault_tolerance import QuorumError, ReplicaManager, Sync, make_diloco
from monarch_slurm.train.llama import count_parameters, loss_function
from monarch_slurm.train.model import make_model, make_optimizer, model_config
from monarch_slurm.train.replica import Replica, open_replica
from monarch_slurm.train.saved import read_state
from monarch_slurm.train.schedule import learning_rate, tokens_within_sync
from monarch_slurm.train.writing import StateWriter

_EVALUATIONS = 25  # validation losses in a run without failures, about
_JOIN_ATTEMPTS = 3  # donors that may die under a joining replica before it gives up


class Engine(Protocol):
    """What the supervisor of a trainer needs of an engine; see `LlamaEngine` for what the arguments mean."""

    def __init__(
        self, config: TrainConfig, place: Place, emit: Callable[[Event], None], injected: Callable[[], None]
    ) -> None: ...

    def run(self) -> None:
        """Train until the run has committed its tokens."""

    def let_go(self, patience: float) -> bool:
        """Stop to wait for peers if that takes longer than ``patience`` seconds; for any thread."""

    def save_soon(self) -> None:
        """Save the state into the run's folder at the next opportunity; for any thread."""


class NonFiniteLossError(MonarchSlurmError):
    """The training loss is not a number any more: the run has diverged, or the hardware computes wrongly."""


def nothing() -> None:
    """Inject no failure."""


def preload(config: TrainConfig | None = None) -> None:
    """Load what the first step of a trainer would load, for a process that trainers are forked from.

    That is the modules which torch imports when they are first needed (an optimizer brings 800 of them), and the
    corpus, which the forked trainers then share. No thread is started, no device touched and no socket opened.

    Args:
        config: the run whose corpus to load; None loads the default one.

    Raises:
        DataError: the corpus cannot be used.
    """
    weight = nn.Parameter(torch.zeros(1, device="cpu"))
    torch.optim.AdamW([weight], fused=False)  # imports torch._dynamo
    np.random.default_rng(0)
    with torch.profiler.record_function("preload"):
        "localhost".encode("idna")
    load_corpus(None if config is None else config.data)


class LlamaEngine:
    """Trains one rank.

    Args:
        config: the run.
        place: where this rank stands in it.
        emit: given every event, always on the thread that calls `run`.
        injected: called once in every inner step, between forward and backward pass; a failure to be injected is raised
            from it.
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
        self._replica: Replica | None = None
        self._asked_to_save = self._save_due = False
        self._writer = StateWriter(place.replica, place.rank)
        self._sampler_at_sync = 0

    def __repr__(self) -> str:
        where = f"replica {self._place.replica} rank {self._place.rank} generation {self._place.generation}"
        return f"<LlamaEngine {self._config.model}, {where}, {self._phase or 'not running'}>"

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
            self._emit("engine_ready", parameters=count_parameters(self._model), seconds=time.time() - began)
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

    def save_soon(self) -> None:
        """Save the state before the next inner step, and again after every sync from then on; for any thread.

        What is saved is the state as of the last committed sync: the steps since then are done again when it is loaded.
        Each save is told by a ``saved`` event.
        """
        self._asked_to_save = True

    def _build(self) -> None:
        config, place = self._config, self._place
        if config.threads > 0:
            torch.set_num_threads(config.threads)
        shape = model_config(config.model)
        self._split = split_corpus(config.data, config.seq_len)
        self._sampler = Sampler(
            self._split,
            seed=config.seed,
            shard=place.replica * place.world_size + place.rank,
            shards=config.replicas * place.world_size,
            batch_size=config.batch_size,
        )
        self._replica = open_replica(place, config.collective_timeout)
        self._device = self._replica.device
        self._model = make_model(shape, config.seed, self._replica)
        self._optimizer = make_optimizer(config, self._model)
        manager = ReplicaManager(config, place, self._replica, self._emit, lambda: self._enter("sync"))
        self._manager = manager
        manager.register_state_dict_fn("trainer", self._load_state, self._save_state)
        # Hooks run in the order in which they are registered: the step is reported before DiLoCo syncs after it.
        self._optimizer.register_step_post_hook(lambda *_: self._report_step())
        self._diloco = make_diloco(manager, self._model, self._optimizer, config)

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

    def _state_to_save(self) -> dict[str, Any]:
        assert self._manager is not None
        tree = self._manager.full_state()
        # The parameters as of the last sync are DiLoCo's; the inner optimizer's moments are as they are now.
        del tree["user"]["trainer"]["model"]
        tree["user"]["trainer"]["sampler"] = {"step": self._sampler_at_sync}
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
        began = time.time()
        tree = state.restore(
            read_state(saved.path(self._place.rank), saved.sha256[self._place.rank]),
            None if self._replica is None else self._replica.mesh,
        )
        self._manager.load_full_state(tree)
        self._diloco._restore_parameters()
        self._sampler_at_sync = self._sampler.step
        self._emit("loaded", step=self._step, seconds=time.time() - began)

    def _save_state(self) -> dict[str, Any]:
        assert self._manager is not None
        return {
            "trained": self._manager.trained,
            "model": dict(self._model.state_dict()),
            "optimizer": self._optimizer.state_dict(),
            "sampler": self._sampler.state_dict(),
        }

    def _load_state(self, saved: dict[str, Any]) -> None:
        assert self._manager is not None
        self._manager.trained = saved["trained"]
        if "model" in saved:  # a state on disk has the parameters once only
            self._model.load_state_dict(saved["model"])
        self._optimizer.load_state_dict(saved["optimizer"])
        self._sampler.load_state_dict(saved["sampler"])

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
        self._save_if_wanted()
        self._step_began = time.time()
        self._local_step += 1
        rate = learning_rate(self._expected_tokens(), self._config)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        inputs, targets = self._sampler.next()
        self._optimizer.zero_grad(set_to_none=True)
        with self._precision():
            loss = loss_function(self._model(inputs.to(self._device)), targets.to(self._device))
        self._injected()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._model.parameters(), self._config.grad_clip)
        self._loss = loss.item()
        if not math.isfinite(self._loss):
            # Raised before the optimizer can carry it into the parameters, and the sync to every other replica.
            raise NonFiniteLossError(f"the training loss of step {self._sampler.step} is {self._loss}")
        self._optimizer.step()
        self._after_sync(self._manager.take_sync())
        self._manager.report_transfers()

    def _expected_tokens(self) -> float:
        return tokens_within_sync(self._tokens, self._local_step, self._participants, self._config)

    def _report_step(self) -> None:
        if self._joining:
            return
        self._emit(
            "step",
            step=self._sampler.step,
            loss=self._loss,
            tokens=self._tokens,
            lr=self._optimizer.param_groups[0]["lr"],
            seconds=time.time() - self._step_began,
        )

    def _after_sync(self, sync: Sync | None) -> None:
        if sync is None:
            return
        assert self._manager is not None
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
            self._sampler_at_sync = self._sampler.step
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

    @torch.no_grad()
    def _evaluate(self, step: int) -> float:
        """Return the mean loss over the validation batches; the ranks of the replica share them."""
        assert self._replica is not None
        assert self._manager is not None
        self._enter("eval")
        batches = list(self._split.validation_batches(self._config.eval_batches, self._config.batch_size))
        ranks = self._place.world_size
        total = weight = 0.0
        for first in range(0, len(batches), ranks):
            # Sharded layers gather in every forward pass: a rank without a batch of its own runs one that counts not.
            mine = first + self._place.rank
            inputs, targets = batches[mine if mine < len(batches) else 0]
            with self._precision():
                loss = loss_function(self._model(inputs.to(self._device)), targets.to(self._device)).item()
            if mine < len(batches):
                total, weight = total + loss * len(inputs), weight + len(inputs)
        total, weight = self._replica.sum([total, weight])
        # All replicas evaluate at the end, and get the same: one tells.
        if self._place.rank == 0 and self._manager.participating_rank() == 0:
            self._emit("eval", step=step, tokens=self._tokens, loss=total / weight)
        return total / weight

    def _precision(self) -> AbstractContextManager[Any]:
        """Return bfloat16 matrix products on a GPU; sharded parameters are gathered in that format already."""
        if self._device.type == "cuda" and self._place.world_size == 1:
            return torch.autocast("cuda", dtype=torch.bfloat16)
        return nullcontext()

    def _finish(self) -> None:
        assert self._manager is not None
        step = int(self._manager.current_step())
        loss = self._evaluate(step)
        self._manager.report_transfers(wait=True)
        verified = self._config.verify_state
        sha256 = state.digest(dict(self._model.state_dict())) if verified else None
        self._emit("finished", tokens=self._tokens, step=step, loss=loss, sha256=sha256)

    def _close(self) -> None:
        if self._manager is not None:
            self._manager.close()
        if self._replica is not None:
            self._replica.close()

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
