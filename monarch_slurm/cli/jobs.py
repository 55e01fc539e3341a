"""``monarch-slurm apply``, ``exec``, ``kill`` and ``context``: the job of this folder, which a module defines."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from monarch_slurm.errors import MonarchSlurmError

if TYPE_CHECKING:
    from monarch_slurm.job import JobTrait


@click.command()
@click.argument("spec", required=False, metavar="[MODULE.JOB]")
def apply(spec: str | None) -> None:
    """Make the hosts of this folder's job, unless they are there. MODULE.JOB becomes this folder's job first.

    They wait a while for a program: `monarch-slurm exec`, or one that calls state() of the job.
    """
    job = _job(spec)
    made = job.ensure_applied()
    click.echo(f"{'applied' if made else 'is there already'}: {job!r}")


@click.command(
    "exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)  # what follows the command is the command's
@click.option("--all", "everywhere", is_flag=True, help="On every host of every mesh.")
@click.option("--mesh", help="On every host of this mesh; with --one and --point, the mesh that they mean.")
@click.option("--one", is_flag=True, help="On rank 0 of the first mesh only; so it is by default.")
@click.option("--point", metavar="DIM=N,...", help="Only where the coordinates are these.")
@click.option("--per-host", metavar="DIM=N,...", help="Run so many times on each host.")
@click.option("-e", "--env", multiple=True, metavar="NAME=VALUE", help="A variable to set.")
@click.option("--workdir", help="Folder to run in.")
@click.option("--output-dir", help="Folder on the hosts for the output of each rank, in place of printing it.")
@click.option("--script", metavar="FILE", help="Run this shell script; - is standard input.")
@click.option("-m", "module", metavar="MODULE", help="Run this Python module.")
@click.option("--kill", "kill_after", is_flag=True, help="End the job afterwards.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def exec_(
    everywhere: bool,
    mesh: str | None,
    one: bool,
    point: str | None,
    per_host: str | None,
    env: tuple[str, ...],
    workdir: str | None,
    output_dir: str | None,
    script: str | None,
    module: str | None,
    kill_after: bool,
    command: tuple[str, ...],
) -> None:
    """Run a command on hosts of this folder's job, which is applied first if it is gone.

    Without --all, --mesh or --point it runs on one host. On several, each rank's output goes to files of its own, and
    the largest exit code is that of this command.
    """
    several = everywhere or (mesh is not None and not one and point is None)
    if sum((everywhere, one, point is not None)) > 1:
        raise click.UsageError("--all, --one and --point exclude each other")
    cmd = _command(command, script, module)
    sizes, place = _numbers("--per-host", per_host), _numbers("--point", point)
    variables = dict(_pair("--env", each) for each in env)
    from monarch_slurm.job import JobSpecError, exec_command

    job = _job(None)
    meshes = job.state()._hosts
    if mesh is not None and mesh not in meshes:
        raise JobSpecError(f"the job has no mesh {mesh!r}; there are: {', '.join(meshes)}")
    names = list(meshes) if everywhere else [mesh or next(iter(meshes))]
    if output_dir is None and several:
        output_dir = str(Path(f".monarch/logs/exec-{time.strftime('%Y%m%d-%H%M%S')}").absolute())
    if output_dir is not None:
        click.echo(f"output: {output_dir}", err=True)
    rank = 0 if not several and point is None else None
    runs = []
    for name in names:
        folder = None if output_dir is None else str(Path(output_dir, name if everywhere else "", "$SUBDIR"))
        runs.append(exec_command(meshes[name], cmd, variables, workdir, folder, rank, place or None, sizes or None))
    code = max(run.get() for run in runs)
    if kill_after:
        _forget(job)
    sys.exit(code)


@click.command()
@click.argument("context", required=False)
def kill(context: str | None) -> None:
    """End the job that is remembered in this folder, or in one of its contexts."""
    from monarch_slurm.job import DEFAULT_JOB_PATH, JobError, job_load
    from monarch_slurm.job.current import state_path

    with _told():
        path = DEFAULT_JOB_PATH if context is None else str(state_path(context))
    try:
        job = job_load(path)
    except FileNotFoundError:
        raise JobError(f"no job is remembered in {path}") from None
    job.kill()
    Path(path).resolve().unlink(missing_ok=True)
    click.echo(f"killed: {job!r}")


@click.group()
def context() -> None:
    """Keep several jobs in this folder; one is in force."""


@context.command("create")
@click.argument("name")
@click.argument("spec", metavar="MODULE.JOB")
def create_context(name: str, spec: str) -> None:
    """Keep MODULE.JOB as NAME; it is in force from now on."""
    with _told():
        from monarch_slurm.job import set_current_job

        set_current_job(spec, name)


@context.command("use")
@click.argument("name")
def use(name: str) -> None:
    """Put the job that is kept as NAME in force."""
    with _told():
        from monarch_slurm.job.current import use_context

        use_context(name)


@context.command("rm")
@click.argument("name")
def remove(name: str) -> None:
    """Forget NAME."""
    with _told():
        from monarch_slurm.job.current import remove_context

        remove_context(name)


@context.command("ls")
def list_all() -> None:
    """List them; a star marks the one in force."""
    with _told():
        from monarch_slurm.job.current import contexts, current_context, state_path

        for name, spec in contexts().items():
            mark = "*" if name == current_context() else " "
            click.echo(f"{mark} {name}  {spec}{'  applied' if state_path(name).exists() else ''}")


def _job(spec: str | None) -> JobTrait:
    from monarch_slurm.job import JobError, load_current_job, set_current_job

    with _told():
        if spec is not None:
            return set_current_job(spec)
        try:
            return load_current_job()
        except FileNotFoundError:
            raise JobError(
                f"{Path.cwd()} has no job yet: `monarch-slurm apply MODULE.JOB` takes one that a Python module defines"
            ) from None


def _forget(job: JobTrait) -> None:
    from monarch_slurm.job import DEFAULT_JOB_PATH

    job.kill()
    Path(DEFAULT_JOB_PATH).resolve().unlink(missing_ok=True)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """A specification that names no job is the user's mistake, and needs no traceback."""
    try:
        yield
    except MonarchSlurmError:
        raise
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        from monarch_slurm.job import JobSpecError

        raise JobSpecError(str(error)) from error


def _command(command: tuple[str, ...], script: str | None, module: str | None) -> list[str] | str:
    if (script is not None) + (module is not None) + (bool(command) and module is None) != 1:
        raise click.UsageError("a command, --script or -m expected")
    if module is not None:
        return ["-m", module, *command]
    if script is not None:
        return sys.stdin.read() if script == "-" else _read(script)
    return list(command)


def _read(script: str) -> str:
    try:
        return Path(script).read_text()
    except OSError as error:
        raise click.UsageError(f"--script {script}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise click.UsageError(f"--script {script} is not text: {error}") from None


def _numbers(option: str, text: str | None) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in text.split(",") if text else ():
        name, number = _pair(option, part)
        if not number.isdecimal():
            raise click.UsageError(f"{option} {text}: DIM=N expected")
        found[name] = int(number)
    return found


def _pair(option: str, text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise click.UsageError(f"{option} {text}: NAME=VALUE expected")
    return name, value
