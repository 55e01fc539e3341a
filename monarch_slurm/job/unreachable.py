"""Whether Slurm's controller answers, and one line for a person when it does not."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from monarch_slurm.job.errors import NoSlurmError, SlurmUnreachableError

if TYPE_CHECKING:
    import subprocess

    from monarch_slurm.job.status import Run

_NO_CLUSTER = re.compile(r"could not establish a configuration source", re.IGNORECASE)
_NO_ANSWER = re.compile(
    r"unable to contact slurm controller|unable to establish controller machine|socket timed out|connection refused"
    r"|connection failure|zero bytes were transmitted",
    re.IGNORECASE,
)
_STATE = re.compile(r"Slurmctld\([^)]*\) at (\S+) is (UP|DOWN)")
_PREFIX = re.compile(r"^(?:\w+: )?(?:error|fatal): ")


def slurm_failure(done: subprocess.CompletedProcess[str], doing: str, run: Run) -> SlurmUnreachableError:
    """Return the error, of one line, for a command of Slurm that has failed.

    Args:
        doing: what is to be said before Slurm's own words, such as ``squeue failed``.
        run: runs a command of Slurm: the controllers are asked for by name if none of them has answered.
    """
    told = no_answer(done.stderr, run)
    if told is not None:
        return SlurmUnreachableError(told)
    return SlurmUnreachableError(f"{doing}: {slurm_words(done.stderr) or f'exit code {done.returncode}'}")


def slurm_words(said: str) -> str:
    """Return in one line what a command of Slurm ``said`` on stderr, without its name before each line."""
    return "; ".join(_PREFIX.sub("", line.strip()) for line in said.splitlines() if line.strip())


def no_answer(said: str, run: Run) -> str | None:
    """Return one line of what is wrong and what to do if a command ``said`` that no controller answers, else None."""
    if _NO_CLUSTER.search(said):
        named = os.environ.get("SLURM_CONF")
        read = f"SLURM_CONF is {named}" if named else "SLURM_CONF is not set, and DNS names no controller"
        return (
            f"Slurm's commands are here, but find no cluster ({read}); run this on a login node of the cluster, or set "
            "SLURM_CONF to its slurm.conf"
        )
    if not _NO_ANSWER.search(said):
        return None
    names = [name for name, _ in _controllers(run)]
    where = f" on {' and '.join(names)}" if names else ""
    return f"Slurm's controller{where} does not answer; try again later, or ask those who run the cluster"


def controller_trouble(run: Callable[..., subprocess.CompletedProcess[str]], seconds: float) -> str:
    """Return why no controller of Slurm answers here; empty if one does.

    Args:
        run: as `monarch_slurm.job.status.run_command`.
        seconds: how long the answer may take.
    """
    try:
        done = run(["scontrol", "ping"], seconds)
    except (NoSlurmError, SlurmUnreachableError) as error:
        return str(error)
    states = _STATE.findall(done.stdout)
    if any(state == "UP" for _, state in states):
        return ""
    if states:
        return f"Slurm's controller on {' and '.join(name for name, _ in states)} does not answer"
    return str(slurm_failure(done, "scontrol ping failed", run))


def _controllers(run: Run) -> list[tuple[str, str]]:
    """Return name and state of each controller that the configuration names."""
    try:
        return _STATE.findall(run(["scontrol", "ping"]).stdout)
    except (NoSlurmError, SlurmUnreachableError):
        return []
