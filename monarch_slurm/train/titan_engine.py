"""TorchTitan as an engine: its model, optimizer, data and inner step, in the loop that all engines share.

One trainer of torchtitan is built per process. Its ``train_step`` is called step by step; its ``train``, and what that
does about checkpoints and time-outs, is not used. TorchFT stands between replicas as for the built-in engine, so
torchtitan itself knows of one replica only, but for its share of the data.
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from monarch_slurm.errors import ConfigError
from monarch_slurm.train import titan
from monarch_slurm.train.config import Place, TrainConfig
from monarch_slurm.train.corpus import DataError
from monarch_slurm.train.diloco import DilocoEngine, Workload
from monarch_slurm.train.positions import Positions
from monarch_slurm.train.replica import open_replica

logger = logging.getLogger(__name__)


def preload() -> None:
    """Load what torchtitan will load, for a process that trainers are forked from, as far as forks can stand it.

    Not torchtitan itself: it looks for an accelerator when it is imported, after which a fork cannot use that any more.
    Nor what starts a thread, as pyarrow does.
    """
    import huggingface_hub  # noqa: F401
    import networkx  # noqa: F401
    import tokenizers  # noqa: F401
    import torch.distributed.checkpoint
    import torch.distributed.pipelining.schedules
    import torchdata.stateful_dataloader  # noqa: F401
    import tyro  # noqa: F401

    torch.optim.AdamW([nn.Parameter(torch.zeros(1, device="cpu"))], fused=False)  # imports torch._dynamo


class TitanEngine(DilocoEngine):
    """Trains what torchtitan's options say; see `DilocoEngine` for the arguments."""

    def _open(self) -> Workload:
        self._enter("warmup")
        _show_log()
        work = self._titan = _TitanWorkload(self._config, self._place)
        work.warm_up()
        return work

    def _finish(self) -> None:
        assert self._manager is not None
        if self._manager.participating_rank() == 0:  # all replicas hold the same model
            self._enter("save")
            self._titan.export()
        super()._finish()


class _TitanWorkload:
    """A trainer of torchtitan.

    Args:
        config: the run.
        place: where this rank stands in it.
    """

    def __init__(self, config: TrainConfig, place: Place) -> None:
        self._config, self._ranks = config, place.world_size
        told = titan.load_config(config.engine_options)
        titan.check(told, place.world_size)
        self._steps_per_run: int = told.training.steps
        self._tokens_per_step = config.tokens_per_sync // config.sync_every * config.replicas
        told.dump_folder = str(Path(place.folder, "titan", f"replica-{place.replica}"))
        told.dataloader = _Share(told.dataloader, place.replica, config.replicas, config.sync_every)
        told.metrics.disable_color_printing = True  # it goes to a file
        # Captured graphs read gradients where they were, and a sync puts others in their place.
        told.training.disable_cuda_graphs = True
        if told.debug.seed is None:
            told.debug.seed = config.seed  # replicas must start with the same parameters
        self.replica = open_replica(place, config.collective_timeout, always_group=True)
        index = self.replica.device.index or 0
        os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.world_size), LOCAL_RANK=str(index))
        # torchtitan would do so, if the process group were not there already.
        torch.autograd.set_multithreading_enabled(False)
        try:
            self._trainer = told.build()
            self._trainer.checkpointer.load(step=told.checkpoint.load_step)
        except (AssertionError, FileNotFoundError, KeyError, NotImplementedError, TypeError, ValueError) as error:
            # A new start would only meet it again.
            self.replica.close()
            raise ConfigError(f"torchtitan cannot build its trainer: {type(error).__name__}: {error}") from error
        self.model: nn.Module = self._trainer.model_parts[0]
        self.optimizer: torch.optim.Optimizer = self._trainer.optimizers
        self._losses: list[torch.Tensor] = []
        self._computed: Callable[[float], None] = lambda loss: None
        self._watch_losses()
        self._positions = Positions(place.folder, place.replica, place.rank, config.save_every, config.keep_saves)
        self._load_position(self._positions.read(place.committed_step))
        self._data: Iterator[Any] = self._trainer.batch_generator(self._trainer.dataloader)
        self._profiler = told.profiler.build(global_step=0, base_folder=told.dump_folder)
        self._profiler.__enter__()

    def export(self) -> None:
        """Write the model as torchtitan's last checkpoint, if checkpoints are enabled."""
        self._trainer.checkpointer.save(self._trainer.step, last_step=True)
        self._trainer.checkpointer.maybe_wait_for_saving()

    def warm_up(self) -> None:
        """Run a forward and a backward pass for nothing: compiling may take minutes, which no peer is to wait for."""
        first = next(self._data)
        self._data = itertools.chain([first], self._data)
        inputs, labels = first
        device = self.replica.device
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        seen = self._trainer.ntokens_seen
        self._trainer.forward_backward_step(
            input_dict=moved, labels=labels.to(device), global_valid_tokens=torch.tensor(labels.numel(), device=device)
        )
        self._losses.clear()
        self._trainer.ntokens_seen = seen
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def steps(self) -> int:
        return int(self._trainer.step)

    def step(self, tokens: float, computed: Callable[[float], None]) -> None:
        from torchtitan.components.dataloader import DataloaderExhaustedError

        self._computed = computed
        self._set_learning_rate(tokens)
        self._trainer.step += 1
        self._trainer.gc_handler.run(self._trainer.step)
        try:
            self._trainer.train_step(self._data)
        except DataloaderExhaustedError:
            raise DataError(
                f"torchtitan's data ended in step {self._trainer.step}: give more of it, fewer --training.steps, or a "
                "dataloader that begins again (--dataloader.infinite)"
            ) from None
        self._profiler.step()

    def learning_rate(self) -> float:
        return float(next(iter(self._trainer.optimizers)).param_groups[0]["lr"])

    def evaluate(self) -> float | None:
        """Return the loss of torchtitan's validator, None if it is not enabled."""
        if not self._trainer.config.validator.enable:
            return None
        losses: list[float] = []
        metrics = self._trainer.metrics_processor
        log = metrics.log_validation

        def keep(loss: float, step: int) -> None:
            losses.append(float(loss))
            log(loss=loss, step=step)

        metrics.log_validation = keep
        try:
            self._trainer.validator.validate(self._trainer.model_parts, self._trainer.step)
        finally:
            metrics.log_validation = log
        for module in self.model.modules():  # a forward pass without a backward one may leave parameters gathered
            if isinstance(module, FSDPModule):
                module.reshard()
        return losses[-1]

    def committed(self, step: int) -> None:
        position = _plain(self._trainer.dataloader.state_dict())
        try:
            self._positions.write(step, position)
        except (TypeError, ValueError) as error:
            logger.warning("a replica that starts again begins its data anew: %s", error)

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": {name: parameter.detach() for name, parameter in self.model.named_parameters()},
            "buffers": dict(_saved_buffers(self.model)),
            "optimizer": self._trainer.optimizers.state_dict(),
            "sampler": {"step": self._trainer.step},
        }

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for name, parameter in self.model.named_parameters():
            if "model" in saved:
                parameter.copy_(saved["model"][name])
        for name, buffer in _saved_buffers(self.model):
            buffer.copy_(saved["buffers"][name])
        self._trainer.optimizers.load_state_dict(saved["optimizer"])
        self._trainer.step = saved["sampler"]["step"]

    def close(self) -> None:
        self._profiler.__exit__(None, None, None)
        self._trainer.close()
        self.replica.close()

    def _watch_losses(self) -> None:
        trainer, forward_backward = self._trainer, self._trainer.forward_backward_step

        def watched(**named: Any) -> torch.Tensor:
            loss: torch.Tensor = forward_backward(**named)
            local = loss.detach()
            self._losses.append(local.to_local() if isinstance(local, DTensor) else local)
            return loss

        trainer.forward_backward_step = watched
        self.optimizer.register_step_pre_hook(self._before_optimizer)

    def _before_optimizer(self, *_: Any) -> None:
        if not self._losses:
            return  # a joining replica counts steps without doing any
        # Each is a sum over this rank's tokens, divided by the number of those of all ranks.
        loss = float(torch.stack(self._losses).sum()) * self._ranks
        self._losses.clear()
        self._computed(loss)

    def _set_learning_rate(self, tokens: float) -> None:
        """Go to the place in torchtitan's schedule that the tokens of the run have reached, as if without failures."""
        place = min(max(round(tokens / self._tokens_per_step) - 1, 0), self._steps_per_run - 1)
        self._trainer.lr_schedulers.load_state_dict({"last_epoch": place})
        for schedule in self._trainer.lr_schedulers:
            for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def _load_position(self, position: Any) -> None:
        if position is not None:
            self._trainer.dataloader.load_state_dict(_pickled(position))


class _Share:
    """Stands for the configuration of a dataloader, and builds it for one of several replicas.

    Args:
        config: torchtitan's configuration.
        replica: index of the replica out of ``replicas``.
        every: inner steps after which the position is asked for.
    """

    def __init__(self, config: Any, replica: int, replicas: int, every: int) -> None:
        self._config, self._replica, self._replicas, self._every = config, replica, replicas, every

    def build(self, *, dp_world_size: int, dp_rank: int, **more: Any) -> Any:
        if "snapshot_every_n_steps" in more:
            more["snapshot_every_n_steps"] = self._every
        return self._config.build(
            dp_world_size=dp_world_size * self._replicas, dp_rank=self._replica * dp_world_size + dp_rank, **more
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _plain(position: dict[str, Any]) -> dict[str, Any]:
    """Return a dataloader's state without the pickle that torchtitan wraps its own values in."""
    return {
        key: {"pickled": pickle.loads(value)} if isinstance(value, bytes) else value for key, value in position.items()
    }


def _pickled(position: dict[str, Any]) -> dict[str, Any]:
    """Undo `_plain`."""
    return {
        key: pickle.dumps(value["pickled"]) if isinstance(value, dict) and "pickled" in value else value
        for key, value in position.items()
    }


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", buffer


def _show_log() -> None:
    """Have torchtitan's lines in the log of this process: it writes them with the root logger, as information."""
    for name in ("monarch_slurm", "torchft", "torchft_quorums", "torchft_commits", "torchft_errors"):
        quiet = logging.getLogger(name)
        quiet.setLevel(quiet.getEffectiveLevel())
    logging.getLogger().setLevel(logging.INFO)
    warnings.filterwarnings("ignore", "To get the last learning rate computed")  # torchtitan's own schedules do that
