"""What TorchTitan is told on the command line, and what a run has to know of it before anything is started.

Nothing here imports torch or torchtitan until an option is looked at.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from monarch_slurm.errors import ConfigError
from monarch_slurm.train.config import TrainConfig

_SUPPORTED = (0, 3)
_STEPS = "--training.steps"
_INSTALL = 'pip install ".[torchtitan]" where monarch_slurm was installed from'


def check_installed() -> None:
    """Make sure that a TorchTitan is there whose trainer is known here.

    Raises:
        ConfigError: it is not.
    """
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        raise ConfigError(f"--engine torchtitan needs torchtitan, which is not installed: {_INSTALL}") from None
    match = re.match(r"(\d+)\.(\d+)", found)
    if match is None or (int(match[1]), int(match[2])) != _SUPPORTED:
        wanted = ".".join(map(str, _SUPPORTED))
        raise ConfigError(f"--engine torchtitan needs torchtitan {wanted}, but {found} is installed: {_INSTALL}")


def load_config(options: Sequence[str]) -> Any:
    """Return what torchtitan's own ``ConfigManager`` makes of a command line, ``--module`` and ``--config`` included.

    Raises:
        ConfigError: there is no torchtitan that can be used, or it does not take the options.
        SystemExit: the options asked for help, and got it.
    """
    check_installed()
    try:
        from torchtitan.config import ConfigManager
    except ImportError as error:
        raise ConfigError(f"torchtitan cannot be imported here: {error}") from None
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return ConfigManager().parse_args(list(options))
    except SystemExit as end:
        if not end.code:
            raise
        raise _refused(_gist(said.getvalue()) or f"exit code {end.code}") from None
    except (ImportError, ValueError, TypeError, AssertionError) as error:
        raise _refused(str(error)) from None


def _refused(text: str) -> ConfigError:
    return ConfigError(f"torchtitan does not take the options after --: {' '.join(text.split())}")


def _gist(said: str) -> str:
    """Return what matters in the box in which torchtitan's parser says what is wrong: a paragraph, and a hint."""
    lines = [line.strip("│ ") for line in said.splitlines() if line.startswith("│")]
    first = " ".join(itertools.takewhile(lambda line: line.strip("─"), lines))
    hint = "Perhaps you meant:"
    return f"{first}. {hint} {lines[lines.index(hint) + 1]}" if hint in lines else first


def described(config: TrainConfig) -> TrainConfig:
    """Return ``config`` with what torchtitan's options say of model and budget.

    ``tokens`` is what ``--training.steps`` steps of all replicas see, were there no failures.

    Raises:
        ConfigError: torchtitan does not take the options, or they ask for something that cannot be had here.
        SystemExit: the options asked for help, and got it.
    """
    titan = load_config(config.engine_options)
    check(titan, config.procs_per_replica)
    sequences, training, spec = batch_of_replica(titan, config.procs_per_replica), titan.training, titan.model_spec
    return replace(
        config,
        model=f"{spec.name} {spec.flavor}",
        data=None,
        seq_len=training.seq_len,
        batch_size=sequences // config.procs_per_replica,
        tokens=training.steps * sequences * training.seq_len * config.replicas,
    )


def without_steps(options: Sequence[str]) -> list[str]:
    """Return torchtitan's options but for the number of steps, which may be another when a run goes on."""
    kept: list[str] = []
    words = iter(options)
    for word in words:
        if word == _STEPS:
            next(words, None)
        elif not word.startswith(f"{_STEPS}="):
            kept.append(word)
    return kept


def batch_of_replica(titan: Any, ranks: int) -> int:
    """Return the sequences of one inner step of a replica of so many ranks."""
    training = titan.training
    return int(training.local_batch_size * ranks if training.global_batch_size < 0 else training.global_batch_size)


def check(titan: Any, ranks: int) -> None:
    """Make sure that replicas of ``ranks`` ranks can train what torchtitan was told.

    Raises:
        ConfigError: they cannot; the text names the option.
    """
    from torchtitan.trainer import Trainer

    if not isinstance(titan, Trainer.Config):
        raise ConfigError(f"--config gives a {type(titan).__qualname__}, which is not torchtitan's trainer of models")
    if hasattr(titan, "fault_tolerance"):
        raise ConfigError(
            "--module torchft.* is torchtitan's own use of TorchFT; replicas are a matter of monarch-slurm here: "
            "give the module without it, such as --module llama3"
        )
    layout = titan.parallelism
    for name in ("tensor", "context", "pipeline", "expert"):
        degree = getattr(layout, f"{name}_parallel_degree")
        if degree != 1:
            raise ConfigError(
                f"--parallelism.{name}_parallel_degree {degree}: the ranks of a replica can only share data "
                "(FSDP, HSDP, DDP) here"
            )
    copies, shards = layout.data_parallel_replicate_degree, layout.data_parallel_shard_degree
    if ranks % copies or shards not in (-1, ranks // copies):
        raise ConfigError(
            f"--parallelism.data_parallel_replicate_degree {copies} times data_parallel_shard_degree {shards} is not "
            f"--procs-per-replica {ranks}"
        )
    if titan.comm.mode != "default":
        raise ConfigError(f"--comm.mode {titan.comm.mode} is not for real training")
    sequences, local = batch_of_replica(titan, ranks), titan.training.local_batch_size
    if local < 1 or sequences < 1 or sequences % (local * ranks):
        raise ConfigError(
            f"--training.global_batch_size {sequences} is that of one replica, and must be a multiple of "
            f"--training.local_batch_size {local} times --procs-per-replica {ranks}"
        )
    if titan.training.steps < 1:
        raise ConfigError(f"--training.steps {titan.training.steps}: at least one is needed")
    if titan.checkpoint.create_seed_checkpoint:
        raise ConfigError("--checkpoint.create_seed_checkpoint does not train; replicas start equal without it")
    if titan.checkpoint.enable and not titan.checkpoint.initial_load_model_only:
        raise ConfigError(
            "--checkpoint.no-initial_load_model_only: only a model can be loaded; to go on with a run, use --resume of "
            "monarch-slurm train"
        )
    if titan.tokenizer is not None and not os.path.isdir(titan.hf_assets_path):
        raise ConfigError(
            f"--hf_assets_path {titan.hf_assets_path} is not a folder; it must hold the model's tokenizer"
        )
