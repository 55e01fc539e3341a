"""From a request to a submitted job: the script that submitit writes, and what Slurm may answer.

The allocation survives the loss of any node but the head: Slurm is told not to end the job for it (``--no-kill``), each
host has a step of its own (see `monarch_slurm.job.steps`), and nobody requeues it unasked.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import shlex
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import submitit

from monarch_slurm.interpreter import SHELL_LINES, module_line
from monarch_slurm.job.batch import BatchPlan, run_batch
from monarch_slurm.job.errors import NoSlurmError, SlurmUnreachableError, SubmitError
from monarch_slurm.job.folder import FOLDER_VARIABLE, JobFolder
from monarch_slurm.job.request import NodeSpec, SlurmRequest
from monarch_slurm.job.share import with_share
from monarch_slurm.job.slurm_options import KEYWORDS, ignored_variables, option_lines
from monarch_slurm.job.status import Run, run_command
from monarch_slurm.job.supervisor import BATCH_VARIABLE
from monarch_slurm.job.unreachable import no_answer, slurm_words

LIMIT_NOTICE = 60
"""Seconds before the time limit at which the program is asked to end; Slurm may be up to a minute early."""

TELL_SECONDS = 5.0
"""Time after which the user hears that sbatch still waits for slurmctld."""

_INHERITED = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SUBMITIT_", "PMI_", "PMIX_", FOLDER_VARIABLE, BATCH_VARIABLE)
_KEPT = ("SLURM_CONF", "SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION", "SBATCH_WCKEY")


logger = logging.getLogger(__name__)


class _Executor(submitit.SlurmExecutor):
    """submitit's executor, except that sbatch does not inherit the limits of the job that we may be in.

    And Python takes the place of the script's shell, which would die of signals that are for `run_batch`.
    """

    given: Mapping[str, object] = MappingProxyType({})
    """Keywords of the request; sbatch would let its environment variables win over the options that they become."""

    @property
    def _submitit_command_str(self) -> str:
        return f"exec {module_line(f'{self.python} -u', 'monarch_slurm.job.submitted', str(self.folder))}"

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        ours = os.environ.keys() - set(inherited_variables(os.environ))
        refused, overridden = ignored_variables({name: os.environ[name] for name in ours}, self.given)
        for name in refused:
            logger.warning("%s=%s is ignored: monarch_slurm sets this option of sbatch itself", name, os.environ[name])
        names = sorted({*inherited_variables(os.environ), *refused, *overridden})
        unset = [item for name in names for item in ("-u", name)]
        return [*(["env", *unset] if unset else []), "sbatch", str(submission_file_path)]

    def submit_calls(self, calls: Sequence[tuple[Any, ...]]) -> str:
        """Submit one array whose tasks call `run_batch`, each with its arguments; return Slurm's number of the array.

        submitit's own arrays are submitted by an executor of its own class, which inherits what an enclosing job set.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        pickles = []
        for index, arguments in enumerate(calls):
            pickles.append(self.folder / f"{index}.pkl")
            submitit.core.utils.DelayedSubmission(run_batch, *arguments).dump(pickles[-1])
        self.parameters["map_count"] = len(calls)
        array_id = str(self._submit_command(self._submitit_command_str).job_id)
        for index, pickle in enumerate(pickles):
            paths = submitit.core.utils.JobPaths(self.folder, job_id=f"{array_id}_{index}")
            paths.move_temporary_file(pickle, "submitted_pickle")
        return array_id


def inherited_variables(env: Mapping[str, str]) -> list[str]:
    """Return the names of the variables in ``env`` that an enclosing job has set and that would shape a new one.

    Outside of a job there are none: what is set there, a person has set. And Slurm sets none of ``_KEPT`` itself.
    """
    if "SLURM_JOB_ID" not in env:
        return []
    return sorted(name for name in env if name.startswith(_INHERITED) and name not in _KEPT)


def _executor(request: SlurmRequest, folder: JobFolder, parallel: int | None = None) -> _Executor:
    executor = _Executor(folder.submitit, python=request.python)
    first = request.components[0] if request.components else NodeSpec(request.all_nodes)
    executor.update_parameters(
        **_node_parameters(request, first),
        job_name=request.job_name,
        ntasks_per_node=1,
        time=request.time_limit,
        account=request.account,
        qos=request.qos,
        dependency=request.dependency,
        comment=request.comment,
        wckey=None,
        stderr_to_stdout=True,
        **({} if parallel is None else {"array_parallelism": parallel}),
        additional_parameters={
            "output": str(folder.batch_log if parallel is None else folder.path / "%a" / folder.batch_log.name),
            **_common_parameters(request),
        },
        setup=[
            *(f"#SBATCH {line}" for line in option_lines((*request.slurm_args, *first.slurm_args))),
            *(line for spec in request.components[1:] for line in _component(request, spec)),
            *request.prologue(),
            *SHELL_LINES,
        ],
        use_srun=False,
    )
    executor.given = {
        name: next(
            (value for each in (request, *request.components) if (value := getattr(each, name, None)) is not None), None
        )
        for name in KEYWORDS.values()
    }
    return executor


def _node_parameters(request: SlurmRequest, spec: NodeSpec) -> dict[str, Any]:
    """Return what is asked of the nodes of ``spec``, as `submitit.SlurmExecutor` takes it."""
    wishes = request.wishes(spec)
    return {**wishes, "nodes": spec.nodes + spec.spares, "exclusive": True if wishes["exclusive"] else None}


def _common_parameters(request: SlurmRequest) -> dict[str, Any]:
    """Return the options that submitit lacks."""
    notice = _notice_seconds(request.time_limit) if request.notice is None else request.notice
    return {
        "no-kill": True,
        "signal": f"B:USR2@{notice}",  # to the batch script alone
        ("requeue" if request.requeue else "no-requeue"): True,
        **({} if request.reservation is None else {"reservation": request.reservation}),
    }


def _component(request: SlurmRequest, spec: NodeSpec) -> list[str]:
    """Return the lines that ask for one more component: Slurm inherits some options from the first, and not others."""
    nodes = _node_parameters(request, spec)
    options = {
        **nodes,
        "exclude": nodes["exclude"] or "",
        "ntasks-per-node": 1,
        "time": request.time_limit,
        "account": request.account,
        "qos": request.qos,
        **_common_parameters(request),
    }
    lines = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={shlex.quote(str(value))}")
        for name, value in sorted(options.items())
        if value is not None
    ]
    return [
        "#SBATCH hetjob",
        *(f"#SBATCH {line}" for line in (*lines, *option_lines((*request.slurm_args, *spec.slurm_args)))),
    ]


def _notice_seconds(time_limit: str | None) -> int:
    """Return how long before the end the program hears of it: never more than a quarter of a short limit."""
    match = re.fullmatch(r"([0-9]+)(?::[0-9]+)?", time_limit or "")
    return LIMIT_NOTICE if match is None else min(LIMIT_NOTICE, max(1, int(match.group(1)) * 15))


def render(request: SlurmRequest, folder: JobFolder) -> str:
    """Return the text of the script that `submit` would give to sbatch."""
    check_commands()
    executor = _executor(with_share(request), folder)
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


def submit(request: SlurmRequest, folder: JobFolder, plan: BatchPlan) -> str:
    """Submit a job whose tasks are host agents; return its id.

    Raises:
        NoSlurmError: there is no Slurm here.
        SlurmUnreachableError: no controller answers.
        SubmitError: Slurm refuses the request.
    """
    executor = _checked_executor(request, folder)
    with _explained(request):
        job_id = str(executor.submit(run_batch, str(folder.path), plan).job_id)
    _link_script(folder, job_id)
    return job_id


def submit_array(
    request: SlurmRequest, folder: JobFolder, tasks: Sequence[tuple[JobFolder, BatchPlan]], parallel: int
) -> str:
    """Submit an array of jobs that differ in their programs, ``parallel`` of them at a time; return the array's id.

    Raises:
        NoSlurmError, SlurmUnreachableError, SubmitError
    """
    executor = _checked_executor(request, folder, parallel)
    with _explained(request):
        job_id = executor.submit_calls([(str(task.path), plan) for task, plan in tasks])
    _link_script(folder, job_id)
    return job_id


def _checked_executor(request: SlurmRequest, folder: JobFolder, parallel: int | None = None) -> _Executor:
    check_commands()
    _check_node_count(request)
    folder.submitit.mkdir(mode=0o700, exist_ok=True)  # submitit would leave its mode to the umask
    return _executor(with_share(request), folder, parallel)


@contextlib.contextmanager
def _explained(request: SlurmRequest) -> Iterator[None]:
    # sbatch tries for minutes while slurmctld is busy
    text = "waiting for Slurm's controller to take the job; sbatch gives up by itself"
    timer = threading.Timer(TELL_SECONDS, print, args=(text,), kwargs={"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        # submitit prints what sbatch complains of, and raises it as well
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    except submitit.core.utils.FailedJobError as error:
        raise _explain(str(error), request) from None
    finally:
        timer.cancel()


def _link_script(folder: JobFolder, job_id: str) -> None:
    script = folder.submitit / f"{job_id}_submission.sh"
    folder.submission_script.symlink_to(os.path.relpath(script, folder.path))


def _check_node_count(request: SlurmRequest, run: Run = run_command) -> None:
    """Refuse what Slurm would accept and then leave in the queue for ever."""
    if request.components:
        return  # each may have a partition of its own, and sbatch refuses what no partition can give
    sizes = partition_sizes(run)
    wanted = (
        request.partition or os.environ.get("SBATCH_PARTITION") or next((n for n in sizes if n.endswith("*")), None)
    )
    if wanted is None:
        return
    known = {name.rstrip("*"): count for name, count in sizes.items()}
    names = [name.rstrip("*") for name in wanted.split(",")]
    if all(name in known for name in names) and request.all_nodes > max(known[name] for name in names):
        raise SubmitError(
            f"{_count(request.all_nodes, 'node')} asked for, more than partition {wanted.rstrip('*')} has; "
            f"{_describe(sizes)}"
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
    listed = ", ".join(f"{name} ({_count(count, 'node')})" for name, count in sizes.items())
    return f"partitions here: {listed or 'none that sinfo shows'}; * marks the default"


def _explain(said: str, request: SlurmRequest) -> SubmitError | SlurmUnreachableError:
    silent = no_answer(said, run_command)
    if silent is not None:
        return SlurmUnreachableError(silent)
    words = slurm_words(said) or "sbatch failed and gave no reason"
    hint = ""
    if "partition" in said.lower():
        hint = f". {_describe(partition_sizes())}".replace(". p", ". P", 1)
    elif "node configuration" in said or "node count" in said.lower():
        hint = f". No nodes of the cluster have what was asked for: {_wishes(request)}"
    return SubmitError(f"Slurm refused the job: {words}{hint}")


def _wishes(request: SlurmRequest) -> str:
    """Return in words what was asked for, of each kind of nodes."""
    kinds = [request.of_kind(kind) for kind in range(len(request.kinds))]
    return "; ".join(map(_wishes_of_kind, kinds))


def _wishes_of_kind(request: SlurmRequest) -> str:
    named = {
        "partition": request.partition,
        "gres": request.gres,
        "constraint": request.constraint,
        "nodelist": request.nodelist,
        "exclude": request.exclude,
        "reservation": request.reservation,
        "qos": request.qos,
    }
    counts = {"GPU": request.gpus_per_node, "CPU": request.cpus_per_task}
    each = [_count(count, noun) for noun, count in counts.items() if count is not None]
    each += [f"{request.mem} memory"] if request.mem is not None else []
    listed = [f"{_count(request.all_nodes, 'node')}" + (f" with {' and '.join(each)} each" if each else "")]
    listed += [f"--{name}={value}" for name, value in named.items() if value is not None]
    return ", ".join([*listed, *request.slurm_args])


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count != 1 else ''}"


def default_python() -> str:
    """Return the command that starts the Python that runs here, on a machine that shares its files."""
    return shlex.quote(sys.executable)
