"""``python -m monarch_slurm.job.launch``: the job of a batch script that a person wrote, as in ``sbatch_templates``.

It does inside of such a script what `SlurmJob` does with a script of its own: it makes the job's folder, starts a host
agent on each node, and runs the program, in which ``SlurmJob({"hosts": 1}).state().hosts`` are all nodes of the job.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from monarch_slurm.job.allocation import SlurmAllocation
from monarch_slurm.job.base import BatchJob, program_arguments
from monarch_slurm.job.batch import BatchPlan, run_batch
from monarch_slurm.job.container import RUNTIMES, Container
from monarch_slurm.job.errors import JobError, JobSpecError
from monarch_slurm.job.folder import JobFolder
from monarch_slurm.job.head import ask_quickly
from monarch_slurm.job.slurm import DEFAULT_LOG_DIR, SlurmJob
from monarch_slurm.job.status import listed_id
from monarch_slurm.job.submission import check_commands, default_python
from monarch_slurm.owned_files import FileRefusedError, check_folder, followed, write_whole

MODULE = "monarch_slurm.job.launch"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the job around this process until its program ends; leaves with the program's exit code."""
    options = _parser().parse_args(arguments)
    try:
        check_commands()
        allocation = SlurmAllocation.from_env()
        plan = _plan(options)
        job = _job(options, len(allocation.nodes))
        name = listed_id(allocation.command_id, ask_quickly)
        folder = _folder(Path(options.log_dir), allocation, name)
        job.adopt(name, folder)
        write_whole(folder.job_pickle, BatchJob(job).dumps())
    except (JobError, FileRefusedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, JobSpecError) else 1) from None
    run_batch(str(folder.path), plan)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        usage="%(prog)s [options] -- PROGRAM [ARGUMENT ...]",
        description="Run a program as the controller of all nodes of the Slurm job around this process.",
    )
    parser.add_argument("--address", help="interface, network or IP address that the job's processes use on each node")
    parser.add_argument("--data-address", help="the same for what procs send one another [default: as --address]")
    parser.add_argument("--container", metavar="IMAGE", help="image that program and agents run in")
    parser.add_argument("--container-runtime", choices=RUNTIMES, help="what starts it [default: by the file's ending]")
    parser.add_argument("--container-python", default="python3", help="command that starts Python inside of it")
    parser.add_argument("--container-mount", action="append", default=[], metavar="PATH[:PATH]")
    parser.add_argument("--container-arg", action="append", default=[], metavar="OPTION", help="option of the runtime")
    parser.add_argument(
        "--log-dir",
        default=os.path.join(os.environ.get("SLURM_SUBMIT_DIR", ""), DEFAULT_LOG_DIR),
        help="folder in which the job's folder is made; all nodes must see it [default: runs, beside the submission]",
    )
    parser.add_argument(
        "--preflight", action="append", default=[], metavar="COMMAND", help="must succeed on a node before its agent"
    )
    parser.add_argument(
        "--requeue",
        action="store_true",
        help="the job starts again when its first node is lost or its program has saved",
    )
    parser.add_argument("--spares", type=int, default=0, help="nodes to keep for the places of others")
    # not "request": what sbatch was told of these nodes is not known here
    choices = ("shrink", "fail")
    parser.add_argument("--on-lost", choices=choices, default="shrink", help="if no spare is left [default: shrink]")
    parser.add_argument(
        "--health-check",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whether nodes are examined before they are used [default: if there are spares]",
    )
    parser.add_argument("--srun-arg", action="append", default=[], help="option of the srun that starts each host")
    parser.add_argument("program", nargs="*", help="a .py file or a command, and its arguments")
    return parser


def _plan(options: argparse.Namespace) -> BatchPlan:
    if not options.program:
        raise JobSpecError("no program: say sbatch SCRIPT train.py ARGUMENTS")
    container = None
    if options.container:
        container = Container(
            options.container,
            options.container_runtime,
            options.container_python,
            tuple(options.container_mount),
            tuple(options.container_arg),
        )
    python = default_python()
    return BatchPlan(
        program=tuple(program_arguments(options.program, python if container is None else container.python)),
        python=python,
        address=options.data_address or options.address,
        requeue=options.requeue,
        srun_args=tuple(options.srun_arg),
        preflight=tuple(options.preflight),
        container=container,
    )


def _job(options: argparse.Namespace, nodes: int) -> SlurmJob:
    """Return what the program inside finds as its job."""
    if not 0 <= options.spares < nodes:
        raise JobSpecError(f"{options.spares} spares of {nodes} nodes leave none to use")
    return SlurmJob(
        {"hosts": nodes - options.spares},
        address=options.address,
        data_address=options.data_address,
        health_check=options.health_check,
        log_dir=options.log_dir,
        spares=options.spares,
        on_lost=options.on_lost,
    )


def _folder(base: Path, allocation: SlurmAllocation, name: str) -> JobFolder:
    """Return the job's folder: that of its first start, when Slurm has started it again, or twice by mistake.

    A folder with an exit code, on a first start, is of a job before the cluster counted from 1 again.

    Args:
        name: Slurm's number of the job; for an element of an array ``ARRAY_INDEX``.
    """
    names = dict.fromkeys((name, allocation.command_id))
    for link in (base.absolute() / known for known in names):
        if link.is_symlink() and link.is_dir():
            folder = JobFolder(followed(link))
            check_folder(folder.path, "to use it as that of this job", root=False)
            if allocation.restarts or folder.exit_code() is None:
                return folder
    folder = JobFolder.create(base, os.environ.get("SLURM_JOB_NAME", "job"))
    for known in names:
        folder.link_as(known)
    output = os.readlink("/proc/self/fd/1")
    if os.path.isfile(output):  # what sbatch calls --output: the program's output goes there, too
        folder.controller_log.symlink_to(output)
        folder.batch_log.symlink_to(output)
    else:
        print(f"the program's output is in {folder.controller_log}", flush=True)
    return folder


if __name__ == "__main__":
    main()
