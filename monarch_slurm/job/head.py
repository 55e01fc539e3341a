"""Whether the head node of a job is still there, asked by the other nodes when the controller has fallen silent.

A job submitted with ``--no-kill`` stays in the state RUNNING when Slurm takes its head away, with nobody to end it.
"""

from __future__ import annotations

import enum
import logging
import random
import subprocess
from collections.abc import Sequence

from monarch_slurm.job.allocation import SlurmAllocation
from monarch_slurm.job.errors import NodeListError, NoSlurmError, SlurmUnreachableError
from monarch_slurm.job.folder import JobFolder
from monarch_slurm.job.nodelist import expand
from monarch_slurm.job.status import PHASES, JobId, Phase, Run, run_command
from monarch_slurm.owned_files import FileRefusedError, append_owned

logger = logging.getLogger(__name__)

LEAST_POLL_SECONDS = 5.0
QUESTIONS_PER_SECOND = 2.0
"""What all nodes of a job together may ask of slurmctld."""


QUICK_SECONDS = 5.0
"""What the supervisor of the program waits for an answer, for it has other things to do."""


class Head(enum.Enum):
    """What Slurm says of the head node of a job."""

    THERE = "there"
    LOST = "lost"
    UNKNOWN = "unknown"
    JOB_ENDED = "job ended"


def poll_seconds(nodes: int) -> tuple[float, float]:
    """Return when one of ``nodes`` nodes asks first, a random time, and the pause between its further questions."""
    spread = nodes / QUESTIONS_PER_SECOND
    return random.uniform(0, spread), max(LEAST_POLL_SECONDS, spread)  # noqa: S311 - so that not all ask at once


def head_state(job_id: JobId, run: Run = run_command) -> Head:
    """Ask Slurm whether the node of the batch script is still one of the job's nodes and answers."""
    try:
        # the first component of a heterogeneous job, which has the lowest number, is the one with the head
        lines = run(["squeue", "-h", "-j", str(job_id), "--sort=i", "-o", "%T|%B|%N"]).stdout.strip().splitlines()
        if not lines:
            return Head.UNKNOWN  # slurmctld does not answer, or it is over and we are about to be ended
        state, head, nodes = lines[0].split("|")
        phase = PHASES.get(state)
        if phase is not Phase.RUNNING:
            return Head.JOB_ENDED if phase in (Phase.ENDING, Phase.ENDED) else Head.UNKNOWN
        if head not in expand(nodes):
            return Head.LOST
        node = run(["sinfo", "-h", "-n", head, "-o", "%T"]).stdout.split()
    except (NoSlurmError, SlurmUnreachableError, NodeListError, ValueError) as error:
        logger.warning("cannot ask Slurm for the head node: %s", error)
        return Head.UNKNOWN
    # "allocated*" does not answer, and Slurm will take it from the job if it stays like that
    return Head.THERE if node and not any("*" in word or word.startswith("down") for word in node) else Head.UNKNOWN


def ask_quickly(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands, as `run_command` does, but do not wait for long."""
    return run_command(command, QUICK_SECONDS)


def job_nodes(job_id: JobId, run: Run = ask_quickly) -> set[str] | None:
    """Return the nodes that a job still has; None if Slurm does not tell."""
    try:
        listed = run(["squeue", "-h", "-j", str(job_id), "-o", "%N"]).stdout.strip()
        return set(expand(listed)) if listed else None
    except (NoSlurmError, SlurmUnreachableError, NodeListError) as error:
        logger.warning("cannot ask Slurm for the job's nodes: %s", error)
        return None


def end_without_head(folder: JobFolder, allocation: SlurmAllocation, requeue: bool, run: Run = run_command) -> None:
    """End the job, or start it again, and say why in its batch log; it does no harm if several nodes do so."""
    plan = "starting the job again" if requeue else "ending the job"
    line = f"monarch_slurm: {allocation.node_name}: the head node is lost: {plan}\n"
    logger.warning("%s", line.strip())
    try:
        with open(append_owned(folder.batch_log), "a") as log:
            log.write(line)
    except (OSError, FileRefusedError) as error:
        logger.warning("cannot write that into %s: %s", folder.batch_log, error)
    command = ["scontrol", "requeue"] if requeue else ["scancel"]
    done = run([*command, allocation.command_id])
    if done.returncode != 0:
        logger.error("%s: %s", command[0], done.stderr.strip())
