"""The command group, and how errors reach the user."""

from __future__ import annotations

import io
import os
import sys

import click

from monarch_slurm._version import __version__
from monarch_slurm.cli.attach import attach
from monarch_slurm.cli.cancel import cancel
from monarch_slurm.cli.debug import debug
from monarch_slurm.cli.doctor import doctor
from monarch_slurm.cli.exit_codes import IN_WORDS, INTERRUPTED, PIPE_CLOSED, code_of
from monarch_slurm.cli.jobs import apply, context, exec_, kill
from monarch_slurm.cli.logs import logs
from monarch_slurm.cli.native import build
from monarch_slurm.cli.shell import shell
from monarch_slurm.cli.stacks import stacks
from monarch_slurm.cli.status import status
from monarch_slurm.cli.submit import submit
from monarch_slurm.cli.template import template
from monarch_slurm.cli.train import train
from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.inherited import settle_inheritance
from monarch_slurm.interrupts import ignore_interrupts


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    help=f"Fault-tolerant training on Slurm clusters, driven by one Python program.\n\n{IN_WORDS}",
)
@click.version_option(__version__, prog_name="monarch-slurm")
def cli() -> None:  # noqa: D103 - its text is above
    pass


for command in (
    apply, attach, build, cancel, context, debug, doctor, exec_, kill, logs, shell, stacks, status, submit, template,
    train,
):  # fmt: skip
    cli.add_command(command)


def main() -> None:
    """Run the command line; errors that the user can act on are printed without a traceback."""
    try:
        settle_inheritance()
    except MonarchSlurmError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="replace"
            )  # a character that the terminal lacks must not end a run, or its output
    try:
        cli(standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):
        ignore_interrupts()  # what was started is being ended now, and half an end would leave processes
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of our output (head, less) has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(PIPE_CLOSED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except MonarchSlurmError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(code_of(error))
