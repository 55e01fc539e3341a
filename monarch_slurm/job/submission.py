"""From a request to a submitted job: the script that submitit writes, and what Slurm may answer.

The allocation survives the loss of any node but the head: Slurm is told not to end the job for it (``--no-kill``), each
host has a step of its own (see `monarch_slurm.job.steps`), and nobody requeues it unasked.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import submitit

from monarch_slurm.job.batch import run_batch
from monarch_slurm.job.errors import JobSpecError, NoSlurmError, SubmitError
from monarch_slurm.job.folder import FOLDER_VARIABLE, JobFolder
from monarch_slurm.job.status import Run, run_command

LIMIT_NOTICE = 60
"""Seconds before the time limit at which the program is asked to end; Slurm may be up to a minute early."""

_TIME_LIMIT = re.compile(r"(?:[0-9]+-)?[0-9]+(?::[0-9]{1,2}){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)

_INHERITED = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SUBMITIT_", "PMI_", "PMIX_", FOLDER_VARIABLE)
_KEPT = ("SLURM_CONF", "SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION", "SBATCH_WCKEY")


@dataclass(frozen=True)
class SlurmRequest:
    """What is asked of Slurm, whatever the hosts are for.

    Attributes:
        nodes: how many.
        time_limit: as ``sbatch --time`` takes it; None leaves it to the partition.
        slurm_args: further options of sbatch, each as on its command line; they win over all others.
        setup: shell lines for the head node before the program and the agents start, for modules and the like.
        python: command that starts Python on the nodes.
        requeue: whether the job starts again from the beginning after its head node is lost.
    """

    nodes: int
    job_name: str
    python: str
    slurm_args: tuple[str, ...] = ()
    time_limit: str | None = None
    partition: str | None = None
    exclusive: bool = True
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    account: str | None = None
    qos: str | None = None
    setup: tuple[str, ...] = ()
    requeue: bool = False

    def __post_init__(self) -> None:
        if self.time_limit is not None and not _TIME_LIMIT.fullmatch(self.time_limit):
            raise JobSpecError(
                f"time limit {self.time_limit!r}: write minutes, hours:minutes:seconds, days-hours or "
                "days-hours:minutes:seconds"
            )
        option_lines(self.slurm_args)


def option_lines(arguments: Sequence[str]) -> list[str]:
    """Return sbatch's options in ``arguments``, one per line; ``["-C", "mi300"]`` may also be ``["-C mi300"]``.

    Raises:
        JobSpecError: a value has no option before it, or an argument has a line break.
    """
    lines: list[str] = []
    for argument in arguments:
        if "\n" in argument:
            raise JobSpecError(f"the Slurm option {argument!r} has a line break")
        if argument.startswith("-"):
            name, blank, value = argument.partition(" ")
            separate_value = blank and "=" not in name
            lines.append(f"{name} {shlex.quote(value)}" if separate_value else shlex.quote(argument))
        elif lines and " " not in lines[-1] and "=" not in lines[-1]:
            lines[-1] += f" {shlex.quote(argument)}"
        else:
            raise JobSpecError(f"Slurm option {argument!r}: an option starts with '-', such as --constraint=mi300")
    return lines


class _Executor(submitit.SlurmExecutor):
    """submitit's executor, except that sbatch does not inherit the limits of the job that we may be in.

    And Python takes the place of the script's shell, which would die of signals that are for `run_batch`.
    """

    @property
    def _submitit_command_str(self) -> str:
        return f"exec {super()._submitit_command_str}"

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        unset = [item for name in inherited_variables(os.environ) for item in ("-u", name)]
        return [*(["env", *unset] if unset else []), "sbatch", str(submission_file_path)]


def inherited_variables(env: Mapping[str, str]) -> list[str]:
    """Return the names of the variables in ``env`` that an enclosing job has set and that would shape a new one.

    Outside of a job there are none: what is set there, a person has set. And Slurm sets none of ``_KEPT`` itself.
    """
    if "SLURM_JOB_ID" not in env:
        return []
    return sorted(name for name in env if name.startswith(_INHERITED) and name not in _KEPT)


def _executor(request: SlurmRequest, folder: JobFolder) -> _Executor:
    executor = _Executor(folder.submitit, python=request.python)
    restart = f'[ -z "${{SLURM_RESTART_COUNT:-}}" ] || rm -f {_quote(folder.exit_code_file, folder.controller_file)}'
    executor.update_parameters(
        job_name=request.job_name,
        nodes=request.nodes,
        ntasks_per_node=1,
        partition=request.partition,
        time=request.time_limit,
        exclusive=True if request.exclusive else None,
        gpus_per_node=request.gpus_per_node,
        cpus_per_task=request.cpus_per_task,
        mem=request.mem,
        account=request.account,
        qos=request.qos,
        wckey=None,
        stderr_to_stdout=True,
        additional_parameters={
            "output": str(folder.batch_log),
            "no-kill": True,
            "signal": f"B:USR2@{_notice_seconds(request.time_limit)}",  # to the batch script alone
            ("requeue" if request.requeue else "no-requeue"): True,
        },
        setup=[
            *(f"#SBATCH {line}" for line in option_lines(request.slurm_args)),
            *([restart] if request.requeue else []),
            *request.setup,
        ],
        use_srun=False,
    )
    return executor


def _quote(*paths: Path) -> str:
    return " ".join(shlex.quote(str(path)) for path in paths)


def _notice_seconds(time_limit: str | None) -> int:
    """Return how long before the end the program hears of it: never more than a quarter of a short limit."""
    match = re.fullmatch(r"([0-9]+)(?::[0-9]+)?", time_limit or "")
    return LIMIT_NOTICE if match is None else min(LIMIT_NOTICE, max(1, int(match.group(1)) * 15))


def render(request: SlurmRequest, folder: JobFolder) -> str:
    """Return the text of the script that `submit` would give to sbatch."""
    check_commands()
    executor = _executor(request, folder)
    return str(executor._make_submission_file_text(executor._submitit_command_str, ""))


def check_commands() -> None:
    """Make sure that Slurm is here.

    Raises:
        NoSlurmError: a command is missing.
    """
    missing = [name for name in ("sbatch", "srun", "squeue", "scancel") if shutil.which(name) is None]
    if missing:
        raise NoSlurmError(
            f"no Slurm here: {', '.join(missing)} not on PATH; run this on a login node of the cluster, or use local "
            "hosts"
        )


def submit(request: SlurmRequest, folder: JobFolder, program: Sequence[str] | None, address: str | None) -> int:
    """Submit a job whose tasks are host agents; return its id.

    Args:
        program: command line of the controller, to be run on the head node; None if it runs elsewhere.
        address: option for `find_address` on each node.

    Raises:
        NoSlurmError: there is no Slurm here.
        SubmitError: Slurm refuses the request.
    """
    check_commands()
    _check_node_count(request)
    executor = _executor(request, folder)
    try:
        # submitit prints what sbatch complains of, and raises it as well
        with contextlib.redirect_stderr(io.StringIO()):
            command = None if program is None else list(program)
            job = executor.submit(run_batch, str(folder.path), command, address, request.requeue, request.python)
    except submitit.core.utils.FailedJobError as error:
        raise _explain(str(error), request) from None
    script = folder.submitit / f"{job.job_id}_submission.sh"
    folder.submission_script.symlink_to(os.path.relpath(script, folder.path))
    return int(job.job_id)


def _check_node_count(request: SlurmRequest, run: Run = run_command) -> None:
    """Refuse what Slurm would accept and then leave in the queue for ever."""
    sizes = partition_sizes(run)
    wanted = (
        request.partition or os.environ.get("SBATCH_PARTITION") or next((n for n in sizes if n.endswith("*")), None)
    )
    if wanted is None or any(re.match(r"-p|--partition|--clusters|-M", argument) for argument in request.slurm_args):
        return
    known = {name.rstrip("*"): count for name, count in sizes.items()}
    names = [name.rstrip("*") for name in wanted.split(",")]
    if all(name in known for name in names) and request.nodes > max(known[name] for name in names):
        raise SubmitError(
            f"{request.nodes} nodes asked for, more than partition {wanted.rstrip('*')} has; {_describe(sizes)}"
        )


def partition_sizes(run: Run = run_command) -> dict[str, int]:
    """Return the number of nodes of each partition; the default one's name ends with ``*``. Empty if nobody answers."""
    sizes: dict[str, int] = {}
    for line in run(["sinfo", "-h", "-o", "%P|%D"]).stdout.splitlines():
        name, _, count = line.partition("|")
        if count.isdecimal():
            sizes[name] = sizes.get(name, 0) + int(count)
    return sizes


def _describe(sizes: Mapping[str, int]) -> str:
    listed = ", ".join(f"{name} ({count} node{'s' if count != 1 else ''})" for name, count in sizes.items())
    return f"partitions here: {listed or 'none that sinfo shows'}; * marks the default"


def _explain(said: str, request: SlurmRequest) -> SubmitError:
    words = "; ".join(line.strip() for line in said.splitlines() if line.strip()) or "sbatch failed and gave no reason"
    hint = ""
    if "partition" in said.lower():
        hint = f". {_describe(partition_sizes())}".replace(". p", ". P", 1)
    elif "node configuration" in said or "node count" in said.lower():
        hint = f". No node can do that: {request.nodes} nodes with {_wishes(request)} were asked for"
    elif "unable to contact" in said.lower() or "Connection refused" in said:
        hint = ". Slurm's controller does not answer; try again later"
    return SubmitError(f"Slurm refused the job: {words}{hint}")


def _wishes(request: SlurmRequest) -> str:
    wishes = {
        "GPUs": request.gpus_per_node,
        "CPUs": request.cpus_per_task,
        "memory": request.mem,
    }
    listed = [f"{value} {name}" for name, value in wishes.items() if value is not None]
    listed += request.slurm_args
    return ", ".join(listed) or "no special wishes"


def default_python() -> str:
    """Return the command that starts the Python that runs here, on a machine that shares its files."""
    return shlex.quote(sys.executable)
