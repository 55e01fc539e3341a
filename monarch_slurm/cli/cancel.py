"""``monarch-slurm cancel``."""

from __future__ import annotations

from collections.abc import Sequence

import click

from monarch_slurm.cli.exit_codes import code_of


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
def cancel(jobs: Sequence[str]) -> None:
    """End jobs, and all that runs on their nodes.

    JOB is Slurm's number of a job, or its folder. The program of a job gets SIGTERM first, and has Slurm's KillWait (30
    seconds unless set) to save what it wants to keep.
    """
    from monarch_slurm.job import JobError

    code = 0
    for name in jobs:  # what is wrong with one of them is nothing to the others
        try:
            _cancel(name)
        except JobError as error:
            click.echo(f"error: {error}", err=True)
            code = max(code, code_of(error))
    if code:
        raise SystemExit(code)


def _cancel(name: str) -> None:
    from monarch_slurm.job import JobEndedError, Phase
    from monarch_slurm.job.locate import find_job
    from monarch_slurm.job.status import COMMAND_TIMEOUT, answers_within, query
    from monarch_slurm.job.unreachable import slurm_failure

    run = answers_within(COMMAND_TIMEOUT)
    job = find_job(name, run=run)
    status = query(job.job_id, run)
    if status.phase is Phase.ENDED:
        raise JobEndedError(f"{status}: it has ended already")
    done = run(["scancel", job.job_id])
    if done.returncode != 0:
        raise slurm_failure(done, f"could not cancel job {job.job_id}", run)
    click.echo(f"cancelled job {job.job_id}")
