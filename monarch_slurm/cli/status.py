"""``monarch-slurm status``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from monarch_slurm.job.locate import FoundJob, ListedJob
    from monarch_slurm.job.status import Run

ANSWER_SECONDS = 5.0
"""Time for the job's controller to answer."""

SLURM_SECONDS = 10.0
"""Time for all answers of Slurm to one command."""


@click.command()
@click.argument("job", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--log-dir", help="Folder that holds the job's folder, if Slurm has forgotten the job [default: runs].")
def status(job: str | None, as_json: bool, log_dir: str | None) -> None:
    """Show your jobs, or what one of them is doing: hosts, procs, actors, participants of a training.

    JOB is Slurm's number of a job, or its folder.
    """
    from monarch_slurm.job.locate import find_job, my_jobs
    from monarch_slurm.job.status import answers_within

    run = answers_within(SLURM_SECONDS)
    if job is None:
        listed, others = my_jobs(run)
        if as_json:
            click.echo(json.dumps([_listed_fields(item) for item in listed], indent=2))
        else:
            _print_list(listed, others)
        return
    told = look_at(find_job(job, log_dir, run), run=run)
    if as_json:
        click.echo(json.dumps(told, indent=2))
    else:
        from rich.console import Console

        from monarch_slurm.cli.status_view import describe

        Console(highlight=False, soft_wrap=True).print(describe(told))


def look_at(job: FoundJob, slurm: dict[str, Any] | None = None, run: Run | None = None) -> dict[str, Any]:
    """Return what Slurm, the job's folder and its controller say of a job.

    Args:
        slurm: what Slurm has just said; None asks it.
        run: how to ask it; None takes `SLURM_SECONDS` at most.

    Returns:
        A map with ``job_id``, ``folder``, ``exit_code`` of the program, ``signal`` (name of the one that has ended it,
        None if none has), ``resume`` (how to continue a training that has not finished; empty if that makes no sense),
        ``slurm`` (None if Slurm has forgotten the job), ``census``, ``training`` (None if there is no answer, or
        nothing of the kind) and ``silence`` (why).
    """
    from monarch_slurm.job import JobNotFoundError, SlurmUnreachableError
    from monarch_slurm.job.status import answers_within
    from monarch_slurm.wire import AdminClient, KeyFileError, NoAnswerError
    from monarch_slurm.wire.admin import QUESTIONS

    told: dict[str, Any] = {"job_id": job.job_id, "folder": str(job.folder.path), "exit_code": job.folder.exit_code()}
    told |= {"signal": _signal(told["exit_code"]), "resume": _how_to_continue(job) if told["exit_code"] else ""}
    told |= {"slurm": slurm, "census": None, "training": None, "silence": ""}
    try:
        told["slurm"] = slurm = slurm or ask_slurm(job.job_id, run or answers_within(SLURM_SECONDS))
        if slurm["phase"] == "ended" and told["exit_code"] is None:
            told["resume"] = _how_to_continue(job)
        if slurm["phase"] != "running":
            return told
    except (JobNotFoundError, SlurmUnreachableError) as error:
        told["silence"] = str(error)
        if isinstance(error, JobNotFoundError):
            return told
    try:
        with AdminClient(job.folder.path) as client:
            told["census"] = client.ask("census", ANSWER_SECONDS)
            if "training" in client.ask(QUESTIONS, ANSWER_SECONDS):
                told["training"] = client.ask("training", ANSWER_SECONDS)
    except (NoAnswerError, KeyFileError) as error:
        told["silence"] = "; ".join(filter(None, (told["silence"], str(error))))
    return told


def _signal(code: int | None) -> str | None:
    from monarch_slurm.host.exits import signal_name

    return signal_name(code - 128) if code is not None and code > 128 else None


def _how_to_continue(job: FoundJob) -> str:
    from monarch_slurm.train.saved import RUN_LINK, how_to_continue

    run = job.folder.path / RUN_LINK
    return how_to_continue(run.resolve()) if run.is_dir() else ""


def ask_slurm(job_id: str, run: Run) -> dict[str, Any]:
    """Return what Slurm says of a job: the fields of `JobStatus`, its phase, and all of it as a text.

    Raises:
        JobNotFoundError, SlurmUnreachableError, NoSlurmError
    """
    from monarch_slurm.job.status import query

    seen = query(job_id, run)
    return {**asdict(seen), "phase": seen.phase.value, "text": str(seen)}


def _listed_fields(item: ListedJob) -> dict[str, Any]:
    fields = asdict(item)
    del fields["job"]
    return {"job_id": item.job.job_id, "folder": str(item.job.folder.path), **fields}


def _short_folder(job: FoundJob) -> str:
    """Return the path of a job's folder for a person: by the job's number, and from here if it lies below."""
    folder = job.folder.path
    link = folder.parent / job.job_id
    named = link if link.is_symlink() and link.resolve() == folder else folder
    return str(named.relative_to(Path.cwd())) if named.is_relative_to(Path.cwd()) else str(named)


def _print_list(listed: list[ListedJob], others: int) -> None:
    if listed:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("job", "name", "state", "elapsed", "left", "nodes", "folder"):
            table.add_column(name, overflow="fold")
        for item in listed:
            nodes = item.nodes or (f"({item.reason})" if item.reason else "")
            cells = (item.job.job_id, item.name, item.state, item.elapsed, item.left, nodes, _short_folder(item.job))
            table.add_row(*map(Text, cells))
        # In a pipe or a file nothing is folded, however long the line is.
        Console(highlight=False, width=None if sys.stdout.isatty() else 10_000).print(table)
    else:
        click.echo("no job of yours is in the queue")
    if others:
        click.echo(f"and {others} that monarch_slurm has not started (squeue --me shows them)", err=True)
