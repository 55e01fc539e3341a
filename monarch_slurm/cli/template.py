"""``monarch-slurm template``: batch scripts to copy and edit."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import click

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.owned_files import followed, write_whole


@click.group()
def template() -> None:
    """Batch scripts to copy and edit, each runnable as `sbatch FILE train.py ARGUMENTS...`."""


@template.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with what each template lets you fill in.")
def list_templates(as_json: bool) -> None:
    """List the templates."""
    from monarch_slurm.job.templates import templates

    known = templates()
    if as_json:
        told = [{"name": name, "title": found.title, "fields": found.fields} for name, found in known.items()]
        click.echo(json.dumps(told, indent=2))
        return
    width = max(map(len, known))
    for name, found in known.items():
        click.echo(f"{name:{width}}  {found.title}")


@template.command()
@click.argument("name")
def show(name: str) -> None:
    """Print a template as it is."""
    from monarch_slurm.job.templates import find_template

    click.echo(find_template(name).text, nl=False)


@template.command()
@click.argument("name")
@click.argument("values", nargs=-1, metavar="[FIELD=VALUE]...")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="File to write [default: standard output].")
@click.option("--force", is_flag=True, help="Write over a file that is there.")
def render(name: str, values: Sequence[str], output: str | None, force: bool) -> None:
    """Fill a template in.

    FIELD is an option of Slurm that the template has (partition, account, nodes, time, gpus-per-node ...) or one of its
    variables (modules, venv, address ...). An empty value turns an option of Slurm off.

    \b
    Example:
      monarch-slurm template render mi300x nodes=4 partition=gpu time=12:00:00 venv=$HOME/venv -o train.sbatch
      sbatch train.sbatch train.py --lr 1e-3
    """
    from monarch_slurm.job.templates import find_template
    from monarch_slurm.job.templates import render as fill

    if "=" in name:
        raise click.UsageError(f"{name!r} stands where the name of a template is expected, such as: render cpu {name}")
    fields = {}
    for value in values:
        field, equals, text = value.partition("=")
        if not equals:
            raise click.BadParameter(f"{value!r}: FIELD=VALUE expected, such as nodes=4")
        if field in fields:
            raise click.BadParameter(f"{field} is given twice")
        fields[field] = text
    text = fill(find_template(name), fields)
    if output is None:
        click.echo(text, nl=False)
        return
    path = Path(output)
    if os.path.lexists(path) and not force:
        raise MonarchSlurmError(f"{path} is there already; --force writes over it")
    try:
        write_whole(followed(path), text.encode(), 0o644)
    except OSError as error:
        raise MonarchSlurmError(f"cannot write {path}: {error.strerror}") from None
