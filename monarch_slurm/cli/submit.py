"""``monarch-slurm submit``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import click

from monarch_slurm.cli.slurm_options import job_arguments, job_options, pairs, wants_to_follow


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--nodes", type=click.IntRange(1), help="Number of nodes; they are the mesh `hosts` of the program.")
@click.option("--mesh", "meshes", multiple=True, metavar="NAME=NODES", help="In place of --nodes: one mesh of several.")
@job_options("monarch_job", follow=False)
@click.option("--log-dir", help="Folder in which the job's folder is made; all nodes must see it [default: runs].")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def submit(
    nodes: int | None, meshes: Sequence[str], log_dir: str | None, program: Sequence[str], **options: Any
) -> None:
    """Submit a program that drives the nodes of a Slurm job.

    PROGRAM is a .py file or a command; what comes after it is its own. It runs on the first node as the controller,
    and in it SlurmJob(...).state() has the job's meshes.

    \b
    Example:
      monarch-slurm submit --nodes 4 -p mi300 --gpus-per-node 8 --time 8:00:00 train.py --lr 1e-3
    """
    from monarch_slurm.job import SlurmJob
    from monarch_slurm.job.program_files import check_files

    follow = wants_to_follow(options, default=False)
    arguments = job_arguments(options)
    job = SlurmJob(_sizes(nodes, meshes), log_dir=log_dir, **arguments)
    check_files(program, venv=arguments["venv"], container=arguments["container"], setup=arguments["setup"])
    if options["dry_run"]:
        click.echo(job.dry_run(program), nl=False)
        return
    job.apply(program)
    if options["as_json"]:
        click.echo(json.dumps({"job_id": job.job_id, "folder": str(job.folder)}))
        return
    click.echo(f"submitted job {job.job_id}; its folder: {job.folder}", err=follow)
    if follow:
        try:
            code = job.follow(sys.stdout)
        except KeyboardInterrupt:
            click.echo(f"job {job.job_id} continues; monarch-slurm cancel {job.job_id} ends it", err=True)
            raise
        raise SystemExit(code)


def _sizes(nodes: int | None, meshes: Sequence[str]) -> dict[str, int]:
    if nodes is not None and meshes:
        raise click.UsageError("--nodes and --mesh exclude each other: --nodes N is --mesh hosts=N")
    if nodes is None and not meshes:
        raise click.UsageError("say how many nodes: --nodes N, or --mesh NAME=N for each mesh")
    if nodes is not None:
        return {"hosts": nodes}
    sizes = pairs("--mesh", meshes)
    if bad := [size for size in sizes.values() if not size.isdecimal()]:
        raise click.BadParameter(f"{bad[0]!r} is no number of nodes", param_hint="--mesh")
    return {name: int(size) for name, size in sizes.items()}
