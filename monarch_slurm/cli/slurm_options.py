"""The options of every command that asks Slurm for nodes: one definition of each, so that no command lacks any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from monarch_slurm.job import Container

_Command = TypeVar("_Command", bound=Callable[..., Any])

_CONTAINER_OPTIONS = (
    click.option("--container", "image", metavar="IMAGE", help="Image in which program and agents run (.sif, .sqsh)."),
    click.option(
        "--container-runtime",
        type=click.Choice(["apptainer", "singularity", "pyxis"]),
        help="What starts the image [default: by the ending of its file].",
    ),
    click.option(
        "--container-mount",
        "container_mounts",
        multiple=True,
        metavar="PATH[:PATH]",
        help="Folder to mount in the container; the job's own folder is mounted anyway.",
    ),
    click.option(
        "--container-arg",
        "container_args",
        multiple=True,
        metavar="OPTION",
        help="One more option of `apptainer exec`, or of srun for Pyxis, such as --container-arg=--rocm.",
    ),
)

_HOST_OPTIONS = (
    click.option(
        "--address", help="Interface, network or IP address that the job's processes use on each node, or 'fastest'."
    ),
    click.option(
        "--preflight", multiple=True, metavar="COMMAND", help="Must succeed on a node before its agent starts."
    ),
    *_CONTAINER_OPTIONS,
    click.option(
        "--python",
        "python_exe",
        help="Command that starts Python on the nodes, or in the container if there is one [default: this Python; in a "
        "container python3].",
    ),
    click.option("--srun-arg", "srun_args", multiple=True, help="One more option of the srun that starts each host."),
)
"""What concerns the host agents, whoever has asked for the nodes."""

_JOB_OPTIONS = (
    click.option("--partition", "-p", help="Slurm partition."),
    click.option("--account", "-A", help="Slurm account."),
    click.option("--qos", help="Slurm QOS."),
    click.option("--time", "time_limit", help="Time limit, as sbatch takes it."),
    click.option("--gpus-per-node", type=click.IntRange(1)),
    click.option("--cpus-per-task", type=click.IntRange(1), help="CPUs of each node."),
    click.option("--mem", help="Memory of each node, such as 200G."),
    click.option("--gres", help="Other generic resources of each node."),
    click.option("--constraint", "-C", help="Features that the nodes must have."),
    click.option("--nodelist", "-w", help="Nodes that must be among them."),
    click.option("--exclude", "-x", help="Nodes that must not be among them."),
    click.option("--reservation", help="Slurm reservation."),
    click.option("--dependency", "-d", help="Jobs to wait for, such as afterok:123."),
    click.option("--comment", help="Comment in Slurm's records."),
    click.option(
        "--exclusive/--no-exclusive",
        default=True,
        show_default=True,
        help="Whether the nodes are for this job alone.",
    ),
    click.option(
        "--requeue/--no-requeue",
        default=False,
        show_default=True,
        help="Whether Slurm starts the job again when its head node is lost, when its program is killed, and when that "
        "has saved near the time limit or a preemption.",
    ),
    click.option(
        "--notice", type=click.IntRange(1), help="Seconds before the time limit at which the program is asked to end."
    ),
    click.option(
        "--spares",
        type=click.IntRange(0),
        default=0,
        show_default=True,
        help="More nodes, to replace those that are lost or not fit.",
    ),
    click.option(
        "--on-lost",
        type=click.Choice(["shrink", "request", "fail"]),
        default="shrink",
        show_default=True,
        help="If a node is lost and no spare is left: continue without it, ask Slurm for one more, or fail.",
    ),
    click.option(
        "--health-check/--no-health-check",
        default=None,
        help="Whether nodes are examined before they are used [default: if there are spares].",
    ),
    click.option(
        "--avoid/--no-avoid",
        default=True,
        show_default=True,
        help="Whether to leave out nodes that were lost or not fit in recent jobs.",
    ),
    click.option("--data-address", help="The same for what procs send one another [default: as --address]."),
    click.option("--module", "modules", multiple=True, help="Environment module to load."),
    click.option("--venv", help="Folder of a virtual environment to activate."),
    click.option("--conda", help="Name or folder of a conda environment to activate."),
    click.option("--env", multiple=True, metavar="NAME=VALUE", help="Environment variable of program and agents."),
    click.option("--setup", multiple=True, metavar="LINE", help="Shell line for the head node before anything starts."),
    *_HOST_OPTIONS,
    click.option(
        "--slurm-arg",
        "slurm_args",
        multiple=True,
        help="One more option of sbatch, such as --slurm-arg=--switches=1.",
    ),
)

_OUTCOME_OPTIONS = (
    click.option("--dry-run", is_flag=True, help="Print what would be submitted, and submit nothing."),
    click.option(
        "--json", "as_json", is_flag=True, help="Print the job's number and folder as JSON; do not follow it."
    ),
)


def _added(command: _Command, options: Sequence[Callable[[_Command], _Command]]) -> _Command:
    for option in reversed(options):
        command = option(command)
    return command


def host_options(command: _Command) -> _Command:
    """Add the options for host agents on nodes that are allocated already; `host_arguments` reads their values."""
    return _added(command, _HOST_OPTIONS)


def job_options(job_name: str, follow: bool) -> Callable[[_Command], _Command]:
    """Return a decorator that adds all options of a job that is submitted; `job_arguments` reads their values.

    Args:
        job_name: Slurm's name of the job, unless another is given.
        follow: whether the command follows its job, unless told otherwise.
    """
    named = click.option("--job-name", "-J", default=job_name, show_default=True, help="Slurm's name of the job.")
    followed = click.option(
        "--follow/--no-follow",
        "-f",
        default=None,
        help="Whether to print the program's output as it comes and to leave with its exit code [default: "
        f"{'follow' if follow else 'no-follow'}].",
    )

    def add(command: _Command) -> _Command:
        return _added(command, (*_JOB_OPTIONS, named, followed, *_OUTCOME_OPTIONS))

    return add


def names_of_job_options() -> set[str]:
    """Return the parameters that `job_options` adds."""

    @job_options("", follow=False)
    def bare() -> None:
        pass

    return {option.name for option in click.command()(bare).params if option.name is not None}


def host_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Take the values of `host_options` out of ``options``; return them as `SlurmAllocation.hosts` has them."""
    taken = {name: options.pop(name) for name in ("address", "preflight", "srun_args")}
    container = _container(options)
    python = options.pop("python_exe")
    return {**taken, "container": container, "python_exe": python if container is None else None}


def job_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Take the values of `job_options` out of ``options``; return them as `SlurmJob` has them, and what to do with it.

    Returns:
        Arguments of `SlurmJob`, except for the meshes and the folder.
    """
    names = names_of_job_options() & options.keys() - {"follow", "dry_run", "as_json"}
    found = {name: options.pop(name) for name in names}
    found.update(host_arguments(found))
    found["env"] = pairs("--env", found["env"])
    return found


def wants_to_follow(options: dict[str, Any], default: bool) -> bool:
    """Return whether the command is to follow its job; ``options`` has the values of `job_options`."""
    quiet = options["dry_run"] or options["as_json"]
    if options["follow"] and quiet:
        raise click.UsageError("--follow excludes --dry-run and --json")
    return not quiet and (default if options["follow"] is None else bool(options["follow"]))


def pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    """Return the values ``NAME=VALUE`` of an option that may be given more than once."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{text!r}: NAME=VALUE expected", param_hint=option)
        if name in found:
            raise click.BadParameter(f"{name} is given twice", param_hint=option)
        found[name] = value
    return found


def _container(options: dict[str, Any]) -> Container | None:
    """Take the options of the container out of ``options``; ``python_exe`` is then the Python inside of it."""
    from monarch_slurm.job import Container

    image, runtime = options.pop("image"), options.pop("container_runtime")
    mounts, arguments = options.pop("container_mounts"), options.pop("container_args")
    if image is None:
        given = {"--container-runtime": runtime, "--container-mount": mounts, "--container-arg": arguments}
        for name, value in given.items():
            if value:
                raise click.UsageError(f"{name} needs --container IMAGE")
        return None
    return Container(image, runtime, options["python_exe"] or "python3", mounts, arguments)
