"""From a plan to a finished report: a run with failures beside one without, on this machine or in a Slurm job."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from monarch_slurm.actor import HostMesh
from monarch_slurm.config import configure, settings
from monarch_slurm.controller import ANSWERS, FolderError, RestartLimit, make_job_folder
from monarch_slurm.errors import ConfigError, MonarchSlurmError
from monarch_slurm.interpreter import module_command
from monarch_slurm.job import Container, JobError, SlurmJob, job_load, save_on_notice
from monarch_slurm.job.folder import FOLDER_VARIABLE, JobFolder
from monarch_slurm.train.answers import answers_of
from monarch_slurm.train.config import TrainConfig
from monarch_slurm.train.corpus import check_corpus
from monarch_slurm.train.events import Event
from monarch_slurm.train.injection import schedule
from monarch_slurm.train.live import LiveView
from monarch_slurm.train.llama_config import model_config
from monarch_slurm.train.manager import Run
from monarch_slurm.train.memory_estimate import check_here, check_nodes
from monarch_slurm.train.report import ReportError, build_report, load_report, write_report
from monarch_slurm.train.resuming import (
    check_changes,
    check_unfinished,
    checked_inputs,
    finished_report,
    history,
    last_config,
    named_change,
)
from monarch_slurm.train.run_lock import alone_in
from monarch_slurm.train.saved import RUN_LINK, find_saved, how_to_continue
from monarch_slurm.train.supervisor import RestartPolicy
from monarch_slurm.train.titan import described
from monarch_slurm.wire.runtime_dir import check_runtime_dir

REFERENCE_FOLDER = "reference"

HOST_RESTART_WINDOW = 1800.0
"""Seconds within which ``max_host_restarts`` counts."""


@dataclass(frozen=True)
class Plan:
    """What ``monarch-slurm train`` was asked for.

    Attributes:
        config: what to train.
        out: folder in which the run's folder is made.
        fail_every: seconds between injected failures; None injects none.
        failures: kinds of failures, in turn.
        max_restarts: restarts of one replica's procs within ``restart_window`` seconds, before the failure escalates
            to its hosts.
        max_host_restarts: restarts of a replica with new zygotes on its hosts, before the replica is given up.
        restart_window: seconds within which ``max_restarts`` counts.
        reference: ``"auto"``, ``"none"``, or the path of the report of a failure-free run.
        resume: folder of a run to continue; None begins a new one.
        force: start although the trainers are estimated to need more memory than there is.
        allow_changed_data: whether a run may continue although its data or tokenizer is not what it was.
    """

    config: TrainConfig
    out: str = "runs"
    fail_every: float | None = None
    failures: tuple[str, ...] = ("kill", "segfault", "exception", "hang")
    max_restarts: int = 8
    max_host_restarts: int = 2
    restart_window: float = 300.0
    reference: str = "auto"
    resume: str | None = None
    force: bool = False
    allow_changed_data: bool = False

    def policy(self) -> RestartPolicy:
        """Return the restart policy."""
        return RestartPolicy(
            mesh=RestartLimit(self.max_restarts, self.restart_window),
            hosts=RestartLimit(self.max_host_restarts, HOST_RESTART_WINDOW),
        )


def train_here(plan: Plan, in_job: bool = False) -> Path:
    """Train on this machine, or on the hosts of the Slurm job around this process; return the run's folder.

    Raises:
        MonarchSlurmError: the run could not be made or finished. A report of what happened is written all the same.
    """
    _check_installed()
    reference = check(plan)
    if not plan.force:
        check_here(plan.config, int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) if in_job else 1)
    check_runtime_dir()  # the client does so too, but by then there is a run, which would end early
    folder = _run_folder(plan, in_job)
    if not settings().preload:
        configure(preload=preload_modules(plan.config))
    if not settings().log_dir:
        configure(log_dir=str(folder / "logs"))
    with contextlib.nullcontext() if in_job else alone_in(folder), save_on_notice(_save):
        if plan.resume is not None:
            check_unfinished(folder)  # it may have been another process's until now
        inputs = checked_inputs(folder, plan.config, plan.allow_changed_data)
        hosts = _job_hosts() if in_job else None
        print(f"run folder: {folder}", flush=True)
        if plan.fail_every is not None and plan.reference == "auto":
            print("training without failures first, to compare with", flush=True)
            calm = replace(plan, fail_every=None)
            beside = _reference_folder(folder, plan.config)
            reference = finished_report(beside)
            if reference is None:
                reference = _train(calm, make_job_folder(beside), hosts, None, inputs)
        _train(plan, folder, hosts, reference, inputs)
    return folder


def _run_folder(plan: Plan, in_job: bool) -> Path:
    """Return the folder of the run: that of its earlier start, if this is not the first."""
    if plan.resume is not None:
        return Path(plan.resume).absolute()
    job_folder = os.environ.get(FOLDER_VARIABLE) if in_job else None
    if job_folder is None:
        return make_run_folder(Path(plan.out))
    link = Path(job_folder) / RUN_LINK
    if not link.is_dir():  # the job's first start
        link.symlink_to(make_run_folder(Path(plan.out)))
    return link.resolve()


def _reference_folder(folder: Path, config: TrainConfig) -> Path:
    """Return the folder of the run to compare with: a new one when that of an earlier start had other options."""
    number = 1
    while True:
        beside = folder / (REFERENCE_FOLDER if number == 1 else f"{REFERENCE_FOLDER}-{number}")
        before = last_config(history(beside))
        if before is None or (before["tokens"], before["lr"]) == (config.tokens, config.lr):
            return beside
        number += 1


def check(plan: Plan) -> Any:
    """Make sure that the plan can work before anything is started; return the reference report, if one is named.

    It needs neither torch nor numpy and reads no more of the text than `check_corpus` does, for it is called on login
    nodes, too.

    Raises:
        MonarchSlurmError: it cannot; the text says why.
    """
    if plan.config.engine == "torchtitan":
        described(plan.config)
    else:
        config = plan.config
        model_config(config.model)
        shards = config.replicas * config.procs_per_replica
        check_corpus(config.data, seq_len=config.seq_len, shards=shards, batch_size=config.batch_size)
    if plan.resume is not None:
        check_unfinished(Path(plan.resume))
        checked_inputs(Path(plan.resume), plan.config, plan.allow_changed_data)
    if plan.reference in ("auto", "none"):
        return None
    try:
        return load_report(plan.reference)
    except ReportError as error:
        raise ConfigError(f"--reference {plan.reference}: {error}") from None


def _check_installed() -> None:
    """Make sure that this machine has what training needs.

    Raises:
        MonarchSlurmError: a package is missing.
    """
    for name in ("numpy", "torch", "torchft"):
        if importlib.util.find_spec(name) is None:
            raise MonarchSlurmError(f'training needs {name}; install it with: pip install "monarch_slurm[train]"')


def make_run_folder(out: Path) -> Path:
    """Make and return a new folder in ``out`` that is named for the present time.

    Raises:
        FolderError: it cannot be made.
    """
    stem = time.strftime("%Y%m%d-%H%M%S")
    make_job_folder(out)
    number = 0
    while True:
        folder = (out / (f"{stem}-{number}" if number else stem)).absolute()
        try:
            folder.mkdir(mode=0o700)  # not exist_ok: of two runs that start in one second, one gets the name
        except FileExistsError:
            number += 1
            continue
        except OSError as error:
            raise FolderError(f"cannot make the folder {folder}: {error.strerror}") from None
        return folder


def train_on_slurm(
    plan: Plan,
    nodes: int,
    arguments: dict[str, Any],
    words: Sequence[str],
    *,
    dry_run: bool = False,
    as_json: bool = False,
    follow: bool = True,
) -> None:
    """Submit the run as a Slurm job of ``nodes`` nodes; unless told otherwise, follow it and leave with its exit code.

    Args:
        arguments: of `SlurmJob`, except for the meshes and the folder.
        words: arguments of ``monarch-slurm`` on the head node.
        dry_run: only print what would be submitted.
        as_json: print the job's number and folder as JSON.

    Raises:
        MonarchSlurmError: the job could not be submitted, or ended by something else than its own program.
    """
    check(plan)
    if not plan.force:
        check_nodes(plan.config, nodes, arguments)
    if not settings().preload:
        env = {"MONARCH_SLURM_PRELOAD": preload_modules(plan.config), **(arguments.get("env") or {})}
        arguments = {**arguments, "env": env}
    if arguments["container"] is not None:
        arguments = {**arguments, "container": _with_mounts(arguments["container"], plan)}
    job = SlurmJob({"hosts": nodes}, log_dir=plan.out, **arguments)
    command = module_command("monarch_slurm", *words, python=job.python)
    if dry_run:
        print(job.dry_run(command), end="", flush=True)
        return
    job.apply(command)
    if as_json:
        print(json.dumps({"job_id": job.job_id, "folder": str(job.folder)}), flush=True)
        return
    print(f"submitted job {job.job_id}; its folder: {job.folder}", flush=True)
    if not follow:
        return
    try:
        code = job.follow(sys.stdout)
    except JobError:
        _tell_how_to_resume(job.folder)
        raise
    except KeyboardInterrupt:
        job.kill()
        print(f"cancelled job {job.job_id}", file=sys.stderr)
        sys.exit(130)
    if code:
        _tell_how_to_resume(job.folder)
    sys.exit(code)


def _tell_how_to_resume(job_folder: Path) -> None:
    """Tell the user, whose job has ended early, whether its run can continue."""
    run = job_folder / RUN_LINK
    if run.is_dir():
        print(how_to_continue(run.resolve()), file=sys.stderr, flush=True)


def _with_mounts(container: Container, plan: Plan) -> Container:
    """Return ``container`` with the paths of the run mounted: where it writes, its text, the run that it resumes."""
    reference = None if plan.reference in ("auto", "none") else plan.reference
    paths = [os.path.abspath(path) for path in (plan.out, plan.config.data, plan.resume, reference) if path is not None]
    new = [path for path in dict.fromkeys(paths) if path not in container.mounts]
    return replace(container, mounts=(*container.mounts, *new))


def preload_modules(config: TrainConfig) -> str:
    """Return the modules that a zygote imports for training, separated by commas.

    The engine comes first: it quiets TorchFT, which reads its log level when it is imported.
    """
    engine = "titan_engine" if config.engine == "torchtitan" else "engine"
    parts = (f"{engine}:preload", "trainer", "supervisor")
    return ",".join(f"monarch_slurm.train.{part}" for part in parts)


def _job_hosts() -> HostMesh:
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        raise ConfigError(f"--in-job is for the program that a job starts: {FOLDER_VARIABLE} is not set")
    state = job_load(str(JobFolder(Path(folder)).job_pickle)).state(cached_path=None)
    hosts: HostMesh = state.hosts
    return hosts


def _train(
    plan: Plan, folder: Path, hosts: HostMesh | None, reference: Any, inputs: Mapping[str, str]
) -> dict[str, Any]:
    config = plan.config
    injections = None
    if plan.fail_every is not None:
        injections = schedule(plan.fail_every, plan.failures, config.replicas, config.procs_per_replica, config.seed)
    failed: BaseException | None = None
    before, saved = history(folder), find_saved(folder)
    if before:
        changes = check_changes(folder, before, config, plan.allow_changed_data)
        at = "from its beginning: no state was saved" if saved is None else f"from sync {saved.step}"
        print(f"going on with run {folder.name} {at}", flush=True)
        for name, values in changes.items():
            print(f"from now on with {named_change(name, *values)}", flush=True)
    with LiveView(config) as view:
        for item in before:
            view.state.apply(item)
        run = Run(config, folder, hosts, plan.policy(), injections, view.update, saved, before, inputs)
        ANSWERS.update(answers_of(run, folder, config, view.state))
        _runs.append(run)
        try:
            run.run()
        except (MonarchSlurmError, KeyboardInterrupt, SystemExit) as error:
            failed = error
        finally:
            _runs.remove(run)
    report = write(folder, run.events, reference)
    if failed is not None and find_saved(folder) is not None:
        print(how_to_continue(folder), flush=True)
    if failed is not None:
        raise failed
    return report


_runs: list[Run] = []
"""The run that is under way."""


def _save() -> None:
    """Save what is under way, for Slurm is about to end the job, or somebody this process."""
    for run in list(_runs):
        run.save()


def write(folder: Path, events: list[Event], reference: Any) -> dict[str, Any]:
    """Write the report of ``events`` into ``folder``, say where it is, and return it."""
    report = build_report(events, reference)
    _, html = write_report(folder, report)
    print(f"report: {html}", flush=True)
    return report
