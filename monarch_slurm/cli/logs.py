"""``monarch-slurm logs``."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from monarch_slurm.cli.status import SLURM_SECONDS

if TYPE_CHECKING:
    from monarch_slurm.job.folder import JobFolder


@click.command()
@click.argument("job")
@click.option("--follow", "-f", is_flag=True, help="Go on until the job has ended.")
@click.option("--host", multiple=True, help="What this node's host agent and its procs printed; may be given again.")
@click.option("--rank", type=click.IntRange(0), multiple=True, help="Only lines of procs of this rank, of all hosts.")
@click.option("--mesh", help="With --rank: only those of the procs of this name.")
@click.option("--batch", is_flag=True, help="What Slurm and the supervisor of the job said.")
@click.option("--lines", "-n", type=click.IntRange(0), help="Only the last so many lines of what is there already.")
@click.option("--log-dir", help="Folder that holds the job's folder, if Slurm has forgotten the job [default: runs].")
def logs(
    job: str,
    follow: bool,
    host: tuple[str, ...],
    rank: tuple[int, ...],
    mesh: str | None,
    batch: bool,
    lines: int | None,
    log_dir: str | None,
) -> None:
    """Print what a job printed: its program, or with an option its hosts.

    JOB is Slurm's number of the job, or its folder. Ctrl-C ends the printing, not the job.
    """
    from monarch_slurm.job.head_news import HeadNews
    from monarch_slurm.job.locate import find_job
    from monarch_slurm.job.logs import LogView, copy_logs, follow_logs
    from monarch_slurm.job.status import answers_within

    if batch and (host or rank):
        raise click.UsageError("--batch excludes --host and --rank")
    if mesh is not None and not rank:
        raise click.UsageError("--mesh needs --rank")
    found = find_job(job, log_dir, answers_within(SLURM_SECONDS))
    if batch:
        paths = [found.folder.batch_log]
    elif host or rank:
        paths = _host_logs(found.folder, host)
    else:
        paths = [found.folder.controller_log]
    if not any(path.exists() for path in paths):
        click.echo(f"nothing was printed yet: {paths[0]} is not there", err=True)
    procs = _proc_logs(found.folder) if host or rank else None
    view = LogView(paths, sys.stdout, ranks=frozenset(rank), mesh=mesh, last=lines, proc_logs=procs, hosts=host)
    if not follow:
        copy_logs(view)
    elif batch or host or rank:
        follow_logs(found.job_id, view)
    else:
        news = HeadNews(found.folder, time.monotonic, from_now=True)
        follow_logs(found.job_id, view, lambda: found.folder.exit_code() is not None, news)


def _proc_logs(folder: JobFolder) -> Path | None:
    """Return the folder of the procs' own logs, if they have some and this machine sees them."""
    link = folder.proc_logs
    if not link.is_symlink():
        return None
    if not link.is_dir():
        click.echo(f"procs write files of their own into {link.readlink()} (log_dir), which is not here", err=True)
        return None
    return link


def _host_logs(folder: JobFolder, hosts: tuple[str, ...]) -> list[Path]:
    there = sorted(path.stem for path in folder.logs.glob("*.log"))
    if missing := [host for host in hosts if host not in there]:
        raise click.BadParameter(
            f"no log of {missing[0]}; there are: {', '.join(there) or 'none yet'}", param_hint="--host"
        )
    return [folder.host_log(name) for name in hosts or there]
