"""Having Slurm start this job again."""

from __future__ import annotations

import logging
import re
import signal
import time

from monarch_slurm.job.errors import NoSlurmError, SlurmUnreachableError
from monarch_slurm.job.folder import JobFolder
from monarch_slurm.job.head import ask_quickly
from monarch_slurm.job.status import JobId, Run
from monarch_slurm.job.supervisor import CHECK_SECONDS, Signals
from monarch_slurm.owned_files import FileRefusedError, read_data, write_whole

logger = logging.getLogger(__name__)

DEFAULT_KILL_WAIT = 30.0
"""Seconds between SIGTERM and SIGKILL of a job that Slurm ends, where slurm.conf says nothing else."""

ASK_SECONDS = 10.0
"""Pause between two tries while slurmctld does not answer."""

END_SECONDS = 60.0
"""Seconds that Slurm may take to end this job, once it has agreed to start it again."""


CRASHES = frozenset(
    {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGSYS}
)
"""Signals that end a program which nobody has asked to end."""

QUICK_SECONDS = 300.0
"""A program that is killed earlier than this after its start may be killed at every start."""

MOST_QUICK_KILLS = 3
"""So many of those in a row, and the job is not started again."""

_QUICK_KILLS = "quick_kills"


def may_start_again(folder: JobFolder, ran: float) -> bool:
    """Count a kill of the job's program; return whether another start is worth trying.

    Args:
        ran: seconds from the program's start to its end.
    """
    path = folder.path / _QUICK_KILLS
    try:
        before = int(read_data(path))
    except FileNotFoundError:
        before = 0
    except (FileRefusedError, ValueError) as error:
        logger.warning("%s does not tell how often the program was killed (%s); counting from 0", path, error)
        before = 0
    count = before + 1 if ran < QUICK_SECONDS else 0
    try:
        write_whole(path, f"{count}\n".encode())
    except OSError as error:
        logger.warning("cannot count in %s how often the program was killed: %s", path, error.strerror)
    return count < MOST_QUICK_KILLS


def kill_wait(run: Run = ask_quickly) -> float:
    """Return the ``KillWait`` of this cluster, seconds."""
    try:
        match = re.search(r"^KillWait\s*=\s*([0-9]+)", run(["scontrol", "show", "config"]).stdout, re.MULTILINE)
    except (NoSlurmError, SlurmUnreachableError):
        match = None
    return float(match.group(1)) if match else DEFAULT_KILL_WAIT


def why_asked_to_end(job_id: JobId, run: Run = ask_quickly) -> str:
    """Return why Slurm has sent its early notice to a job: ``"a preemption"`` or ``"the time limit"``.

    If Slurm does not answer, both are named.
    """
    try:
        told = run(["scontrol", "show", "job", str(job_id)]).stdout
    except (NoSlurmError, SlurmUnreachableError):
        told = ""
    match = re.search(r"\bPreemptTime=(\S+)", told)
    if match is not None and match.group(1) not in ("None", "Unknown", "N/A"):
        return "a preemption"
    return "the time limit" if "EndTime=" in told else "the time limit or a preemption"


def requeue(job_id: JobId, signals: Signals, run: Run = ask_quickly, why: str = "the program has saved") -> bool:
    """Have Slurm start the job around this process again, however long slurmctld takes to answer.

    Args:
        why: for the log.

    Returns:
        Whether it will; it then ends this process, which gets ``signals``. Else the reason is in the log.
    """
    while not signals.stop:
        try:
            done = run(["scontrol", "requeue", str(job_id)])
        except NoSlurmError as error:
            logger.error("cannot start the job again: %s", error)  # noqa: TRY400 - it says all
            return False
        except SlurmUnreachableError as error:
            said, answered = str(error), False
        else:
            said = done.stderr.strip()
            answered = "Unable to contact" not in said and "Connection" not in said
            if done.returncode <= 0:
                logger.warning("%s; Slurm starts the job again", why)
                if done.returncode < 0:
                    return True  # Slurm's SIGTERM reached scontrol before its answer did
                deadline = time.monotonic() + END_SECONDS
                while not signals.stop and time.monotonic() < deadline:
                    signals.wait(CHECK_SECONDS)
                return True
        if answered:
            logger.error("Slurm does not start the job again: %s", said)
            return False
        logger.warning("cannot ask Slurm to start the job again: %s; trying again", said)
        signals.wait(ASK_SECONDS)
    return False
