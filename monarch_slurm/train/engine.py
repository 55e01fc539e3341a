"""The built-in engine: trains a Llama on text, fault-tolerantly, as one rank of one replica.

An *engine* is what a trainer process runs: built from the run's description and its place in it, it trains until the
run has committed its tokens, tells what happens as events, and raises when it cannot go on. Whoever started the process
decides what to do about that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from monarch_slurm.train.config import Place, TrainConfig
from monarch_slurm.train.data import Sampler, load_corpus, split_corpus
from monarch_slurm.train.diloco import DilocoEngine, Workload
from monarch_slurm.train.events import Event
from monarch_slurm.train.llama import loss_function
from monarch_slurm.train.llama_config import model_config
from monarch_slurm.train.model import make_model, make_optimizer
from monarch_slurm.train.replica import open_replica
from monarch_slurm.train.schedule import learning_rate


class Engine(Protocol):
    """What the supervisor of a trainer needs of an engine; see `DilocoEngine` for what the arguments mean."""

    def __init__(
        self, config: TrainConfig, place: Place, emit: Callable[[Event], None], injected: Callable[[], None]
    ) -> None: ...

    def run(self) -> None:
        """Train until the run has committed its tokens."""

    def let_go(self, patience: float) -> bool:
        """Stop to wait for peers if that takes longer than ``patience`` seconds; for any thread."""

    def save_soon(self, wanted: bool = True) -> None:
        """Save the state into the run's folder at the next opportunity, or not any more; for any thread."""

    def discard_save(self, step: int) -> None:
        """Remove what this rank has saved of ``step``; for any thread."""


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


class LlamaEngine(DilocoEngine):
    """Trains a Llama on text; see `DilocoEngine` for the arguments."""

    def _open(self) -> Workload:
        return _LlamaWorkload(self._config, self._place)


class _LlamaWorkload:
    """A Llama, AdamW, and this rank's share of a text."""

    def __init__(self, config: TrainConfig, place: Place) -> None:
        self._config, self._rank, self._ranks = config, place.rank, place.world_size
        shape = model_config(config.model)
        self._split = split_corpus(config.data, config.seq_len)
        self._sampler = Sampler(
            self._split,
            seed=config.seed,
            shard=place.replica * place.world_size + place.rank,
            shards=config.replicas * place.world_size,
            batch_size=config.batch_size,
        )
        self.replica = open_replica(place, config.collective_timeout)
        self._device = self.replica.device
        self.model: nn.Module = make_model(shape, config.seed, self.replica)
        self.optimizer: torch.optim.Optimizer = make_optimizer(config, self.model)

    @property
    def steps(self) -> int:
        return self._sampler.step

    def step(self, tokens: float, computed: Callable[[float], None]) -> None:
        rate = learning_rate(tokens, self._config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        inputs, targets = self._sampler.next()
        self.optimizer.zero_grad(set_to_none=True)
        with self._precision():
            loss = loss_function(self.model(inputs.to(self._device)), targets.to(self._device))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), self._config.grad_clip)
        computed(loss.item())
        self.optimizer.step()

    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over the validation batches; the ranks of the replica share them."""
        batches = list(self._split.validation_batches(self._config.eval_batches, self._config.batch_size))
        total = weight = 0.0
        for first in range(0, len(batches), self._ranks):
            # Sharded layers gather in every forward pass: a rank without a batch of its own runs one that counts not.
            mine = first + self._rank
            inputs, targets = batches[mine if mine < len(batches) else 0]
            with self._precision():
                loss = loss_function(self.model(inputs.to(self._device)), targets.to(self._device)).item()
            if mine < len(batches):
                total, weight = total + loss * len(inputs), weight + len(inputs)
        total, weight = self.replica.sum([total, weight])
        return total / weight

    def committed(self, step: int) -> None:
        """Nothing: where the sampler is follows from its step."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "sampler": self._sampler.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if "model" in saved:
            self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self._sampler.load_state_dict(saved["sampler"])

    def close(self) -> None:
        self.replica.close()

    def _precision(self) -> AbstractContextManager[Any]:
        """Return bfloat16 matrix products on a GPU; sharded parameters are gathered in that format already."""
        if self._device.type == "cuda" and self._ranks == 1:
            return torch.autocast("cuda", dtype=torch.bfloat16)
        return nullcontext()
