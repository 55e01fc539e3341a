"""``monarch-slurm shell``: a prompt that has the nodes of the allocation."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import types
from typing import Any

import click

from monarch_slurm.cli.slurm_options import host_arguments, host_options

BANNER = "hosts: a HostMesh of {count} node{s} of job {job}: {nodes}. Try hosts.spawn_procs(per_host={{'gpus': 8}})."


def _job_id(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"[1-9][0-9]*(_[0-9]+)?", value):
        raise click.BadParameter(f"{value!r}: a job's number in Slurm expected, such as 12, or 12_3 in an array")
    return value


@click.command()
@click.option(
    "--job", metavar="ID", callback=_job_id, help="Job whose nodes to take [default: the one around this shell]."
)
@click.option("--take-over", is_flag=True, help="End the session of another program that has the nodes.")
@click.option("--log-dir", help="Folder for the session's own folder, which all nodes must see.")
@host_options
@click.option("--plain", is_flag=True, help="Python's own prompt, also where IPython is installed.")
def shell(job: str | None, plain: bool, **options: Any) -> None:
    """Open a prompt (IPython if it is installed) whose `hosts` are the nodes of the allocation around this shell.

    Leaving it ends what it has started on the nodes; the allocation stays.
    """
    from monarch_slurm.job import AllocationError, SlurmAllocation
    from monarch_slurm.job.nodelist import compress

    if job is None and "SLURM_JOB_ID" not in os.environ:
        raise AllocationError(
            "this shell is not inside a Slurm job: start one with salloc (salloc --nodes 2 --exclusive monarch-slurm "
            "shell), or name one of your running jobs with --job ID"
        )
    allocation = SlurmAllocation.from_env() if job is None else SlurmAllocation.from_job(job)
    sys.ps1 = ">>> "  # a person types here: failures that nobody handles are to end nothing
    hosts = allocation.hosts(**host_arguments(options), **options)
    count = len(allocation.nodes)
    banner = BANNER.format(count=count, s="s" * (count > 1), job=allocation.job_id, nodes=compress(allocation.nodes))
    # Classes that are defined at the prompt are of __main__, and are sent to the nodes by value.
    main = types.ModuleType("__main__")
    main.__dict__.update(_names(hosts))
    sys.modules["__main__"] = main
    if not plain and importlib.util.find_spec("IPython") is not None:
        _ipython(main, banner)
    else:
        _python(main.__dict__, banner)


def _names(hosts: Any) -> dict[str, Any]:
    from monarch_slurm import actor

    return {"hosts": hosts, "actor": actor, "Actor": actor.Actor, "endpoint": actor.endpoint}


def _python(names: dict[str, Any], banner: str) -> None:
    import code

    if importlib.util.find_spec("readline") is not None:  # Python may have been built without it
        import readline
        import rlcompleter

        readline.set_completer(rlcompleter.Completer(names).complete)
        readline.parse_and_bind("tab: complete")
    code.interact(banner, local=names, exitmsg="")


def _ipython(main: types.ModuleType, banner: str) -> None:
    ipython = importlib.import_module("IPython")
    click.echo(banner)
    ipython.start_ipython(argv=["--no-banner"], user_ns=main.__dict__)
