"""``monarch-slurm train``."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
from click.core import ParameterSource

from monarch_slurm.cli.slurm_options import job_arguments, job_options, names_of_job_options, wants_to_follow
from monarch_slurm.errors import ConfigError
from monarch_slurm.train.config import ENGINES, TORCHFT, TrainConfig

_DEFAULTS = TrainConfig()


def _seconds(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise click.BadParameter("a positive number of seconds expected")
    return value


def _lighthouse(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is None or value == TORCHFT:
        return value
    parts = urlsplit(value)
    try:
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:  # the port is no number
        usable = False
    if not usable or parts.path not in ("", "/"):
        raise click.BadParameter(f"{value!r}: 'torchft' or a URL such as http://host:29510 expected")
    return value


def _rate(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if not 0 < value < math.inf:
        raise click.BadParameter("a positive number expected")
    return value


@click.command()
@click.option("--local", "where", flag_value="local", help="Train in processes on this machine.")
@click.option("--nodes", type=click.IntRange(1), help="Submit a Slurm job of this many nodes, and follow its log.")
@click.option("--replicas", type=click.IntRange(2), default=_DEFAULTS.replicas, show_default=True)
@click.option(
    "--procs-per-replica",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Trainer procs that share one replica.",
)
@click.option(
    "--min-replicas", type=click.IntRange(2), default=2, show_default=True, help="Smallest quorum that may train."
)
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default=_DEFAULTS.engine,
    show_default=True,
    help="What trains: the built-in Llama, or TorchTitan, whose own options follow after --.",
)
@click.option(
    "--replica-backend",
    type=click.Choice(["gloo", "ccl"]),
    default=_DEFAULTS.replica_backend,
    show_default=True,
    help="What reduces between replicas: gloo over the hosts, or RCCL/NCCL (ccl) from GPU to GPU.",
)
@click.option(
    "--lighthouse",
    callback=_lighthouse,
    metavar="torchft|URL",
    help="Let TorchFT's Lighthouse form the quorums: one that the run starts ('torchft'), or the one at a URL such as "
    "http://host:29510. Whoever reaches its ports, or those that TorchFT then opens on every node, can stop the run, "
    "read its state and poison it  [default: the run forms them, over its own encrypted messages]",
)
@click.option("--model", default=_DEFAULTS.model, show_default=True, help="Name of a model configuration.")
@click.option("--data", type=click.Path(), help="Text file or folder [default: the Python standard library's source].")
@click.option(
    "--tokens", type=click.IntRange(1), default=_DEFAULTS.tokens, show_default=True, help="Tokens to train in all."
)
@click.option("--seq-len", type=click.IntRange(8), default=_DEFAULTS.seq_len, show_default=True)
@click.option("--batch-size", type=click.IntRange(1), default=_DEFAULTS.batch_size, show_default=True)
@click.option("--lr", type=float, callback=_rate, default=_DEFAULTS.lr, show_default=True)
@click.option(
    "--sync-every", type=click.IntRange(1), default=_DEFAULTS.sync_every, show_default=True, help="Inner steps."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--fail-every", type=float, callback=_seconds, help="Inject a failure every so many seconds.")
@click.option(
    "--failures", default="kill,segfault,exception,hang", show_default=True, help="Kinds of failures, in turn."
)
@click.option("--step-deadline", type=float, callback=_seconds, default=_DEFAULTS.step_deadline, show_default=True)
@click.option("--sync-deadline", type=float, callback=_seconds, default=_DEFAULTS.sync_deadline, show_default=True)
@click.option(
    "--max-restarts", type=click.IntRange(0), default=8, show_default=True, help="Of a replica's procs, in the window."
)
@click.option(
    "--max-host-restarts",
    type=click.IntRange(0),
    default=2,
    show_default=True,
    help="Of a replica with new zygotes on its hosts, in half an hour; then the replica is given up.",
)
@click.option("--restart-window", type=float, callback=_seconds, default=300.0, show_default=True, help="Seconds.")
@click.option(
    "--reference",
    default="auto",
    show_default=True,
    help="Failure-free run to compare with: 'auto' trains one first if failures are injected; 'none'; a report.json.",
)
@click.option(
    "--out", type=click.Path(file_okay=False), default="runs", show_default=True, help="Folder for run folders."
)
@click.option(
    "--resume",
    type=click.Path(exists=True, file_okay=False),
    help="Folder of a run that was ended early: continue it from its saved state. Options of training that are not "
    "given are as before; --tokens, --lr, --min-replicas and the deadlines may be others.",
)
@click.option(
    "--allow-changed-data",
    is_flag=True,
    help="Continue a run (--resume, --requeue) although its training data or tokenizer has changed since it was saved.",
)
@click.option(
    "--save-every",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Committed syncs from one save of the state to the next; 0: save only when the run is asked to end.",
)
@click.option(
    "--keep-saves", type=click.IntRange(1), default=2, show_default=True, help="How many saved states are kept."
)
@click.option(
    "--force", is_flag=True, help="Start although the trainers are estimated to need more memory than there is."
)
@job_options("monarch-train", follow=True)
@click.option("--in-job", is_flag=True, hidden=True, help="Be the controller of the Slurm job around this process.")
@click.argument("engine_options", nargs=-1, type=click.UNPROCESSED, metavar="[-- ENGINE_OPTIONS]")
@click.pass_context
def train(context: click.Context, /, where: str | None, nodes: int | None, in_job: bool, **options: Any) -> None:
    """Train a Llama on text, or what TorchTitan is told to, over several replicas, and do not stop when parts fail.

    Writes a folder with journal.jsonl, report.json and report.html.

    With --engine torchtitan, what follows after -- is for torchtitan, such as --module llama3 --config
    llama3_debugmodel --training.steps 100: the steps that each replica does if nothing fails.
    """
    from monarch_slurm.gpu import gpu_devices
    from monarch_slurm.job.program_files import check_files
    from monarch_slurm.train.injection import parse_kinds
    from monarch_slurm.train.resuming import resumed_config
    from monarch_slurm.train.session import Plan, train_here, train_on_slurm
    from monarch_slurm.train.titan import described

    given = {name for name in options if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if options["data"] is not None:
        options["data"] = os.path.abspath(options["data"])
    fields = {name: options.pop(name) for name in _CONFIG_OPTIONS}
    if options["resume"] is None:
        config = TrainConfig(**fields)
    else:
        config = resumed_config(
            Path(options["resume"]),
            {name: fields[name] for name in given & fields.keys()},
            options["allow_changed_data"],
        )
    _check_engine(config, given)
    if config.min_replicas > config.replicas:
        raise ConfigError(f"--min-replicas {config.min_replicas} is more than --replicas {config.replicas}")
    if options["fail_every"] is not None and config.replicas == config.min_replicas:
        raise ConfigError(
            f"--fail-every: with --replicas {config.replicas} and --min-replicas {config.min_replicas} any failure "
            f"would hold up the run; take --replicas {config.replicas + 1}"
        )
    plan = Plan(
        config=config,
        out=options["out"],
        fail_every=options["fail_every"],
        failures=parse_kinds(options["failures"]),
        max_restarts=options["max_restarts"],
        max_host_restarts=options["max_host_restarts"],
        restart_window=options["restart_window"],
        reference=options["reference"],
        resume=options["resume"],
        force=options["force"],
        allow_changed_data=options["allow_changed_data"],
    )
    if where == "local" and nodes is not None:
        raise click.UsageError("--local and --nodes exclude each other")
    if where == "local" and config.replica_backend == "ccl" and not gpu_devices():
        raise ConfigError("--replica-backend ccl is for GPUs, and this machine has none")
    for_slurm = names_of_job_options()
    if where == "local" and given & for_slurm:
        names = sorted(_flag(parameter) for parameter in context.command.params if parameter.name in given & for_slurm)
        raise click.UsageError(f"for Slurm only, not for --local: {', '.join(names)}")
    if "failures" in given and options["fail_every"] is None:
        raise click.UsageError("--failures needs --fail-every SECONDS")
    if where is None and nodes is None and not in_job:
        raise click.UsageError("say where to train: --local, or --nodes N for a Slurm job")
    if config.engine == "torchtitan":
        plan = replace(plan, config=described(config))
    if nodes is None or in_job:
        train_here(plan, in_job=in_job)
        return
    follow = wants_to_follow(options, default=True)
    dry_run, as_json = options["dry_run"], options["as_json"]
    arguments = job_arguments(options)
    check_files((), venv=arguments["venv"], container=arguments["container"], setup=arguments["setup"])
    words = _words_in_job(context, given - for_slurm)
    train_on_slurm(plan, nodes, arguments, words, dry_run=dry_run, as_json=as_json, follow=follow)


def _words_in_job(context: click.Context, given: set[str]) -> list[str]:
    """Return the command line of ``monarch-slurm`` that the job's head node runs, by the controller.

    Paths are absolute, for a container may start in a folder of its own.
    """
    words = ["train", "--in-job"]
    for parameter in context.command.params:
        name = parameter.name
        if name not in (given | {"out"}) or not isinstance(parameter, click.Option):
            continue
        value = context.params[name]
        if isinstance(parameter.type, click.Path) or (name == "reference" and value not in ("auto", "none")):
            value = os.path.abspath(value)
        words.append(_flag(parameter) if parameter.is_flag else f"{_flag(parameter)}={value}")
    engine_options = context.params["engine_options"]
    return [*words, "--", *engine_options] if engine_options else words


def _flag(parameter: click.Parameter) -> str:
    """Return the long name of an option."""
    return max(parameter.opts, key=len)


def _check_engine(config: TrainConfig, given: set[str]) -> None:
    """Make sure that the options are for the engine that is to train."""
    if config.engine == "llama":
        if config.engine_options:
            words = " ".join(config.engine_options)
            raise click.UsageError(f"unexpected: {words}; options after -- are for --engine torchtitan")
    elif given & _LLAMA_OPTIONS.keys():
        names = [name for name in _LLAMA_OPTIONS if name in given]
        ours = ", ".join("--" + name.replace("_", "-") for name in names)
        theirs = ", ".join(_LLAMA_OPTIONS[name] for name in names)
        raise click.UsageError(f"for the built-in engine only: {ours}; with torchtitan give, after --: {theirs}")


_LLAMA_OPTIONS = {
    "model": "--module and --config",
    "data": "--dataloader.dataset_path",
    "tokens": "--training.steps",
    "seq_len": "--training.seq_len",
    "batch_size": "--training.local_batch_size",
    "lr": "the optimizer's own",
}
"""Options of the built-in engine, and what stands for them in torchtitan."""

_CONFIG_OPTIONS = (
    "replicas",
    "procs_per_replica",
    "min_replicas",
    "model",
    "data",
    "tokens",
    "seq_len",
    "batch_size",
    "lr",
    "sync_every",
    "seed",
    "step_deadline",
    "sync_deadline",
    "save_every",
    "keep_saves",
    "replica_backend",
    "lighthouse",
    "engine",
    "engine_options",
)
