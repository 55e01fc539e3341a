"""``monarch-slurm attach``."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from monarch_slurm.cli.status import SLURM_SECONDS

if TYPE_CHECKING:
    from monarch_slurm.job.locate import FoundJob
    from monarch_slurm.train.live import LiveView
    from monarch_slurm.wire import AdminClient

REFRESH_SECONDS = 1.0
EVENTS_SECONDS = 0.5
SLURM_PAUSE = 10.0
"""Pause between two questions to slurmctld, which has others to serve."""


@click.command()
@click.argument("job")
@click.option("--log-dir", help="Folder that holds the job's folder, if Slurm has forgotten the job [default: runs].")
@click.option(
    "--timeout", type=click.FloatRange(0), help="Seconds to wait for the job to start [default: as long as it waits]."
)
def attach(job: str, log_dir: str | None, timeout: float | None) -> None:
    """Watch a running job: the live view of a training, or else hosts, procs and what its actors do.

    JOB is Slurm's number of a job, or its folder. As many as like may watch; Ctrl-C ends the watching, not the job.
    """
    from monarch_slurm.job.follow import print_notice
    from monarch_slurm.job.locate import find_job
    from monarch_slurm.job.status import answers_within, query, wait_for_start
    from monarch_slurm.wire import AdminClient, NoAnswerError
    from monarch_slurm.wire.admin import QUESTIONS

    found = find_job(job, log_dir, answers_within(SLURM_SECONDS))
    wait_for_start(found.job_id, timeout, print_notice, query)
    try:
        with AdminClient(found.folder.path) as client:
            if "training_events" in client.ask(QUESTIONS):
                _watch_training(client)
                return
    except NoAnswerError as error:
        # its program has not got its hosts yet, or has none
        print_notice(str(error))
    _watch_hosts(found)


def _watch_training(client: AdminClient) -> None:
    """Draw the run's own live view again, from its events; ends with the run."""
    from monarch_slurm.wire import NoAnswerError

    view: LiveView | None = None
    ended = ""
    run = ""
    since = 0
    catch_up = 0
    try:
        while True:
            answer = client.ask("training_events", since=since, brief=since < catch_up)
            if view is None or answer["run"] != run:  # the run without failures is over, and the one with them begins
                if view is not None:
                    view.__exit__(None, None, None)
                about = client.ask("training")
                run, since, catch_up = about["run"], 0, about["events"]
                view = _live_view(about)
                view.__enter__()
                continue
            for item in answer["events"]:
                view.update(item)
            if answer["next"] == since:
                time.sleep(EVENTS_SECONDS)
            since = answer["next"]
    except NoAnswerError as error:
        if view is None or view.state.ok is None:
            raise
        ended = str(error)
    finally:
        if view is not None:
            view.__exit__(None, None, None)
    click.echo(f"the run has ended ({ended})", err=True)


def _live_view(about: dict[str, Any]) -> LiveView:
    from monarch_slurm.train.config import TrainConfig
    from monarch_slurm.train.live import LiveView

    return LiveView(TrainConfig(**about["config"]))


def _watch_hosts(job: FoundJob) -> None:
    """Show what `status` shows once a second; without a terminal, print the program's output instead."""
    from rich.console import Console
    from rich.live import Live

    from monarch_slurm.cli.status import look_at
    from monarch_slurm.cli.status_view import describe
    from monarch_slurm.job.logs import LogView, follow_logs

    console = Console(highlight=False)
    if not console.is_terminal:
        view = LogView([job.folder.controller_log], sys.stdout)
        follow_logs(job.job_id, view, lambda: job.folder.exit_code() is not None)
        return
    with Live(console=console, auto_refresh=False) as live:
        slurm: dict[str, Any] | None = None
        asked = 0.0
        while True:
            if time.monotonic() - asked > SLURM_PAUSE:
                slurm, asked = None, time.monotonic()
            told = look_at(job, slurm)
            slurm = told["slurm"]
            live.update(describe(told), refresh=True)
            if told["exit_code"] is not None or (slurm is None and not told["census"]) or _has_ended(slurm):
                return
            time.sleep(REFRESH_SECONDS)


def _has_ended(slurm: dict[str, Any] | None) -> bool:
    return slurm is not None and slurm["phase"] == "ended"
