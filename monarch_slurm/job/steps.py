"""A job step of its own for each host, so that what befalls one is nothing to the others.

One step over all nodes would tie them together: srun ends the whole of a step when the connection to one node breaks
(a node that has lost its power resets it when it boots), whatever options it is given.

A step that ends while the program still runs is started again, a few times: its agent joins as a new incarnation of
the host. A node that Slurm has taken from the job is left alone.
"""

from __future__ import annotations

import enum
import json
import logging
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from monarch_slurm.host.agent import FENCED, LEASE_EXPIRED
from monarch_slurm.interpreter import module_command, python_environment
from monarch_slurm.job.allocation import SlurmAllocation, gpus_of_nodes
from monarch_slurm.job.container import Container
from monarch_slurm.job.errors import NodeListError, NoSlurmError, SlurmUnreachableError
from monarch_slurm.job.folder import FOLDER_VARIABLE, JobFolder
from monarch_slurm.job.head import ask_quickly, job_nodes
from monarch_slurm.job.status import JobId, Run, run_command
from monarch_slurm.job.supervisor import CHECK_SECONDS, describe_code, start_child

logger = logging.getLogger(__name__)

HIDDEN_VARIABLE = "MONARCH_SLURM_BATCH_VARIABLES"
"""Environment variable of a step: Slurm's variables of the batch script that srun must not see, as JSON."""

PAUSES = (1.0, 5.0, 25.0)
"""Seconds before each further try to start a host's step; their number is the number of tries."""

FORGET_SECONDS = 3600.0
"""Tries longer ago than this do not count."""

UNKNOWN_PAUSE = 10.0
"""Pause between two questions to a slurmctld that does not answer."""

START_SECONDS = 30.0
"""A task that gives up earlier than this cannot start: it would do so again."""

SLURM_FAILED = 250
"""Exit code of srun when not the task but Slurm has failed; srun takes it from ``SLURM_EXIT_ERROR``."""

HOST_STEP = "host"
"""Slurm's name of the step of a host."""

PROGRAM_STEP = "program"
"""Slurm's name of the step of a program that srun has to start."""

_SEEN_BY_SRUN = (
    "SLURM_JOB",
    "SLURM_CONF",
    "SLURM_CLUSTER_NAME",
    "SLURM_WORKING_CLUSTER",
    "SLURM_SUBMIT_",
    "SLURM_RESTART_COUNT",
    "SLURM_ARRAY_",
    "SLURM_HET_",
    "SLURM_JWT",
    "SLURM_NODE_ALIASES",
)
_HELD = ("step creation temporarily disabled", "Step creation temporarily disabled")
_NOISE = ("lacks support for cpu binding", "srun: got SIG")


class Verdict(enum.Enum):
    """What the end of a host's step means."""

    ENDED = "was told to end"
    FAILED = "has failed"
    LOST = "is lost"


def judge(code: int, said: str, lived: float) -> Verdict:
    """Return what the end of a step means.

    Args:
        code: srun's return code. It is 0 also when srun has lost its connection to the step.
        said: what srun wrote on standard error.
        lived: seconds from the start of srun to its end.
    """
    if code == 0:
        return Verdict.LOST if ": error:" in said else Verdict.ENDED
    if 0 < code < 128 and code not in (LEASE_EXPIRED, FENCED) and lived < START_SECONDS:
        return Verdict.FAILED
    return Verdict.LOST


def step_command(
    folder: JobFolder,
    node: str,
    index: int,
    python: Sequence[str],
    options: Sequence[str] = (),
    srun_args: Sequence[str] = (),
    container: Container | None = None,
    group: int | None = None,
    name: str = HOST_STEP,
) -> list[str]:
    """Return the command line that runs `monarch_slurm.job.node` on one node, with all that the job has there."""
    task = [f"--folder={folder.path}", f"--index={index}", *options]
    words = python if container is None else shlex.split(container.python)
    command = module_command("monarch_slurm.job.node", *task, python=[*words, "-u"])
    if container is not None:
        command = container.wrap(command, folder.path)
        srun_args = [*container.srun_args(folder.path), *srun_args]
    return [
        *_srun(node, group),
        f"--job-name={name}",
        # with %N the node writes the file itself, so that it outlives srun
        f"--output={folder.logs}/%N.log",
        "--open-mode=append",
        *srun_args,
        *command,
    ]


def program_step(
    folder: JobFolder, node: str, group: int | None, command: Sequence[str], container: Container
) -> list[str]:
    """Return the command line that runs the program in a step on the head node: for a container that srun starts."""
    options = [f"--job-name={PROGRAM_STEP}", "--unbuffered", *container.srun_args(folder.path)]
    return [*_srun(node, group), *options, *command]


def signal_program_step(job_id: JobId, run: Run = run_command) -> None:
    """Send SIGTERM to the step of the program."""
    try:
        for line in run(["squeue", "-s", "-h", "-j", str(job_id), "-o", "%i|%j"]).stdout.splitlines():
            step, _, name = line.partition("|")
            if name == PROGRAM_STEP:
                run(["scancel", "--signal=TERM", step])
    except (NoSlurmError, SlurmUnreachableError) as error:
        logger.warning("cannot tell the program that the time limit is near: %s", error)


def _srun(node: str, group: int | None) -> list[str]:
    """Return srun and its options for one task on ``node``.

    Without ``--exact`` and ``--cpus-per-task`` (which implies it) a step gets all CPUs of its node, and without a wish
    for GPUs all that the job has asked for; ``--mem=0`` is the job's memory.
    """
    return [
        "srun",
        *([] if group is None else [f"--het-group={group}"]),
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node}",
        "--overlap",  # the batch script and steps of the program have the same CPUs and GPUs
        "--mem=0",
        "--cpu-bind=none",
        "--mpi=none",
        "--input=none",
        "--export=ALL",
    ]


def step_environment(env: Mapping[str, str], folder: JobFolder) -> dict[str, str]:
    """Return the environment for srun: variables that ask for something on behalf of the whole job are hidden from it.

    ``SLURM_GPUS=32`` of a job of four nodes would be a wish of each step, and some contradict each other. What they say
    goes to the task by `HIDDEN_VARIABLE`, for programs that read them.
    """
    hidden = {
        name: value
        for name, value in env.items()
        if name.startswith(("SLURM_", "SRUN_", "PMI_", "PMIX_")) and not name.startswith(_SEEN_BY_SRUN)
    }
    return {
        **{name: value for name, value in env.items() if name not in hidden},
        HIDDEN_VARIABLE: json.dumps(hidden),
        FOLDER_VARIABLE: str(folder.path),
        "SLURM_EXIT_ERROR": str(SLURM_FAILED),
        "PYTHONUNBUFFERED": "1",
    }


def _shares_of_gpus(job_id: JobId, run: Run = ask_quickly) -> dict[str, int]:
    """Return how many of the GPUs that a job has asked for as a whole (``--gpus``) are on each node.

    srun takes such a wish for one of each step, and that cannot be granted.
    """
    try:
        return gpus_of_nodes(run(["scontrol", "show", "job", "--details", str(job_id)]).stdout)
    except (NoSlurmError, SlurmUnreachableError, NodeListError) as error:
        logger.warning("cannot ask Slurm for the job's GPUs: %s", error)
        return {}


@dataclass
class _Step:
    name: str
    index: int
    process: subprocess.Popen[bytes] | None = None
    said: IO[bytes] | None = None
    started: float = 0.0
    tries: list[float] = field(default_factory=list)
    held: bool = False
    next_try: float | None = None


class Steps:
    """The steps of all hosts of a job.

    Args:
        command: command line of srun for a node's name and index.
        members: asks Slurm for the nodes that the job still has; None if there is no answer.
    """

    def __init__(
        self,
        allocation: SlurmAllocation,
        command: Callable[[str, int], list[str]],
        folder: JobFolder,
        members: Callable[[JobId], Collection[str] | None] = job_nodes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job_id = allocation.command_id
        self._command = command
        self._env = python_environment(step_environment(os.environ, folder))
        self._gpus = _shares_of_gpus(allocation.command_id) if "SLURM_GPUS" in os.environ else {}
        self._members = members
        self._clock = clock
        self._steps = [_Step(name, index) for index, name in enumerate(allocation.nodes)]
        self.worst = 0
        """Largest exit code of a host that is not started again."""

    @property
    def active(self) -> bool:
        """Whether a host's step runs or is to be started again."""
        return any(step.process is not None or step.next_try is not None for step in self._steps)

    def start(self) -> None:
        """Start the steps of all hosts, without waiting for any of them."""
        for step in self._steps:
            self._start(step)

    def check(self, again: bool) -> None:
        """See which steps have ended, and start those again that should run, if ``again``."""
        for step in self._steps:
            if step.process is not None and step.process.poll() is not None:
                self._ended(step, step.process.returncode, again)
            elif step.next_try is not None and not again:
                step.next_try = None
            elif step.next_try is not None and self._clock() >= step.next_try:
                self._start_again(step)
            elif step.process is not None and not step.held and self._clock() - step.started < START_SECONDS:
                self._look_whether_held(step)

    def _look_whether_held(self, step: _Step) -> None:
        """Tell, once, when Slurm lets a step wait for what another one has."""
        assert step.said is not None
        said = os.pread(step.said.fileno(), 4096, 0).decode(errors="replace")
        if any(words in said for words in _HELD):
            step.held = True
            # diagnosis.py looks for these words
            logger.warning(
                "host %s waits: %s (another step has the node's CPUs or GPUs: start that one with srun --overlap)",
                step.name,
                said.strip().splitlines()[-1],
            )

    def end(self, grace: float, wait: Callable[[float], object]) -> None:
        """Wait ``grace`` seconds at most until all steps have ended.

        What is left is up to Slurm, which ends the job's steps in order; a srun that is killed leaves its step alone,
        where SIGTERM would make it kill the step at once.
        """
        deadline = self._clock() + grace
        self.check(again=False)
        while self.active and self._clock() < deadline:
            wait(min(CHECK_SECONDS, max(deadline - self._clock(), 0.01)))
            self.check(again=False)
        for step in self._steps:
            if step.process is not None:
                logger.warning("the step of host %s has not ended within %g s; leaving it to Slurm", step.name, grace)
                step.process.kill()
                step.process.wait()

    def terminate(self, grace: float) -> None:
        """End all steps now: srun kills its step when it gets SIGTERM. It is killed after ``grace`` seconds."""
        running = [step.process for step in self._steps if step.process is not None]
        for process in running:
            process.terminate()
        deadline = self._clock() + grace
        for process in running:
            try:
                process.wait(max(0.0, deadline - self._clock()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, step: _Step) -> None:
        step.next_try = None
        step.held = False
        step.started = self._clock()
        step.said = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the step has ended; no pipe, which fills up
        try:
            command = self._command(step.name, step.index)
            if step.name in self._gpus:
                command.insert(1, f"--gpus-per-node={self._gpus[step.name]}")
            step.process = start_child(command, self._env, errors=step.said)
        except OSError as error:
            step.said.close()
            self._give_up(step, 127, f"cannot start srun where the batch script runs Python: {error.strerror}")

    def _ended(self, step: _Step, code: int, again: bool) -> None:
        assert step.said is not None
        step.process = None
        step.said.seek(0)
        lines = step.said.read().decode(errors="replace").splitlines()
        step.said.close()
        said = "; ".join(line.strip() for line in lines if not any(noise in line for noise in _NOISE))
        reason = describe_code(code) + (f" ({said})" if said else "")
        verdict = judge(code, said, self._clock() - step.started)
        if not again:
            logger.info("the step of host %s ended: %s", step.name, reason)
        elif verdict is Verdict.ENDED:
            logger.info("host %s %s", step.name, verdict.value)
        elif verdict is Verdict.FAILED:
            self._give_up(step, code, reason)
        else:
            self._plan(step, code, reason)

    def _plan(self, step: _Step, code: int, reason: str) -> None:
        now = self._clock()
        step.tries = [when for when in step.tries if now - when < FORGET_SECONDS]
        if len(step.tries) >= len(PAUSES):
            self._give_up(step, code, f"{reason}, after {len(step.tries)} further tries")
            return
        step.next_try = now + PAUSES[len(step.tries)]
        logger.warning("the step of host %s ended: %s", step.name, reason)

    def _start_again(self, step: _Step) -> None:
        members = self._members(self._job_id)
        if members is None:
            step.next_try = self._clock() + UNKNOWN_PAUSE
        elif step.name not in members:
            step.next_try = None
            logger.warning("host %s: Slurm has taken the node from the job", step.name)
        else:
            logger.warning("host %s: starting its step again", step.name)
            step.tries.append(self._clock())
            self._start(step)

    def _give_up(self, step: _Step, code: int, reason: str) -> None:
        self.worst = max(self.worst, code if code >= 0 else 128 - code)
        # diagnosis.py looks for these words
        logger.error("host %s %s: %s", step.name, Verdict.FAILED.value, reason)
