"""``monarch-slurm submit``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import click


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--nodes", type=click.IntRange(1), help="Number of nodes; they are the mesh `hosts` of the program.")
@click.option("--mesh", "meshes", multiple=True, metavar="NAME=NODES", help="In place of --nodes: one mesh of several.")
@click.option("--partition", "-p", help="Slurm partition.")
@click.option("--account", "-A", help="Slurm account.")
@click.option("--qos", help="Slurm QOS.")
@click.option("--time", "time_limit", help="Time limit, as sbatch takes it.")
@click.option("--gpus-per-node", type=click.IntRange(1))
@click.option("--cpus-per-task", type=click.IntRange(1), help="CPUs of each node.")
@click.option("--mem", help="Memory of each node, such as 200G.")
@click.option("--gres", help="Other generic resources of each node.")
@click.option("--constraint", "-C", help="Features that the nodes must have.")
@click.option("--nodelist", "-w", help="Nodes that must be among them.")
@click.option("--exclude", "-x", help="Nodes that must not.")
@click.option("--reservation", help="Slurm reservation.")
@click.option("--dependency", "-d", help="Jobs to wait for, such as afterok:123.")
@click.option("--comment", help="Comment in Slurm's records.")
@click.option("--job-name", "-J", default="monarch_job", show_default=True)
@click.option("--exclusive/--no-exclusive", default=True, show_default=True, help="Whether the nodes are for it alone.")
@click.option(
    "--requeue", is_flag=True, help="The job starts again when its head node is lost or its program has saved."
)
@click.option("--spares", type=click.IntRange(0), default=0, help="More nodes, for the places of nodes that are lost.")
@click.option(
    "--on-lost",
    type=click.Choice(["shrink", "request", "fail"]),
    default="shrink",
    show_default=True,
    help="What to do when no spare is left: go on without the node, ask Slurm for one more, or fail.",
)
@click.option(
    "--notice", type=click.IntRange(1), help="Seconds before the time limit at which the program hears of it."
)
@click.option("--address", help="Interface, network or IP address that the job's processes use on each node.")
@click.option("--module", "modules", multiple=True, help="Environment module to load.")
@click.option("--venv", help="Folder of a virtual environment to activate.")
@click.option("--conda", help="Name or folder of a conda environment to activate.")
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="Environment variable of program and agents.")
@click.option("--setup", multiple=True, metavar="LINE", help="Shell line for the head node before anything starts.")
@click.option("--preflight", multiple=True, metavar="COMMAND", help="Must succeed on a node before its agent starts.")
@click.option("--container", metavar="IMAGE", help="Image that program and agents run in (.sif, .sqsh).")
@click.option(
    "--python", "python_exe", help="Command that starts Python on the nodes [default: the one that runs here]."
)
@click.option(
    "--slurm-arg", "slurm_args", multiple=True, help="One more option of sbatch, such as --slurm-arg=--switches=1."
)
@click.option("--srun-arg", "srun_args", multiple=True, help="One more option of the srun that starts each host.")
@click.option("--log-dir", help="Folder in which the job's folder is made; all nodes must see it [default: runs].")
@click.option(
    "--follow", "-f", is_flag=True, help="Print the program's output as it comes, and leave with its exit code."
)
@click.option("--dry-run", is_flag=True, help="Print what would be submitted, and submit nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the job's number and folder as JSON.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def submit(
    nodes: int | None,
    meshes: Sequence[str],
    env: Sequence[str],
    follow: bool,
    dry_run: bool,
    as_json: bool,
    program: Sequence[str],
    **options: Any,
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

    if follow and (dry_run or as_json):
        raise click.UsageError("--follow excludes --dry-run and --json")
    job = SlurmJob(_sizes(nodes, meshes), env=_pairs("--env", env), **options)
    check_files(program, venv=options["venv"], container=options["container"], setup=options["setup"])
    if dry_run:
        click.echo(job.dry_run(program), nl=False)
        return
    job.apply(program)
    if as_json:
        click.echo(json.dumps({"job_id": job.job_id, "folder": str(job.folder)}))
        return
    click.echo(f"submitted job {job.job_id}; its folder: {job.folder}", err=follow)
    if follow:
        try:
            code = job.follow(sys.stdout)
        except KeyboardInterrupt:
            click.echo(f"job {job.job_id} goes on; monarch-slurm cancel {job.job_id} ends it", err=True)
            raise
        raise SystemExit(code)


def _sizes(nodes: int | None, meshes: Sequence[str]) -> dict[str, int]:
    if nodes is not None and meshes:
        raise click.UsageError("--nodes and --mesh exclude each other: --nodes N is --mesh hosts=N")
    if nodes is None and not meshes:
        raise click.UsageError("say how many nodes: --nodes N, or --mesh NAME=N for each mesh")
    if nodes is not None:
        return {"hosts": nodes}
    sizes = _pairs("--mesh", meshes)
    if bad := [size for size in sizes.values() if not size.isdecimal()]:
        raise click.BadParameter(f"{bad[0]!r} is no number of nodes", param_hint="--mesh")
    return {name: int(size) for name, size in sizes.items()}


def _pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{text!r}: NAME=VALUE expected", param_hint=option)
        if name in pairs:
            raise click.BadParameter(f"{name} is given twice", param_hint=option)
        pairs[name] = value
    return pairs
