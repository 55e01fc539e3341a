"""Why a job ended or a host did not come up, from what lies in the job's folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from monarch_slurm.job.errors import HostStartError, JobEndedError, JobError, JobFolderError
from monarch_slurm.job.folder import JobFolder, tail
from monarch_slurm.job.status import JobStatus

if TYPE_CHECKING:
    from monarch_slurm.actor import HostMesh

MAX_QUOTED_HOSTS = 3

_HOST_HELD = re.compile(r" host (\S+) waits: (.+)$", re.MULTILINE)
_HOST_FAILED = re.compile(r" host (\S+) has failed: (.+)$", re.MULTILINE)


def failed_hosts(folder: JobFolder) -> dict[str, str]:
    """Return the hosts that are not started again, with the reason that `monarch_slurm.job.steps` tells."""
    return _said_of_hosts(folder, _HOST_FAILED)


def _said_of_hosts(folder: JobFolder, pattern: re.Pattern[str]) -> dict[str, str]:
    try:
        said = folder.batch_log.read_text(errors="replace")
    except OSError:
        return {}
    return dict(pattern.findall(said))


def host_problem(folder: JobFolder, hosts: Iterable[str], problem: str) -> HostStartError:
    """Return the error that says ``problem`` of ``hosts``, with the last lines of their logs."""
    failed = failed_hosts(folder)
    held = _said_of_hosts(folder, _HOST_HELD)
    ended = "".join(f"\n  host {host} has failed: {failed[host]}" for host in hosts if host in failed)
    ended += "".join(f"\n  host {host} waits: {held[host]}" for host in hosts if host in held)
    return HostStartError(f"{problem}{ended}{_quote_hosts(folder, hosts)}")


def gather_or_explain(folder: JobFolder, names: Sequence[str], timeout: float) -> HostMesh:
    """Wait for the agents of the named hosts of a job; give up at once when one of them has failed.

    Args:
        timeout: seconds.

    Raises:
        HostStartError: some did not come; the text says why.
    """
    from monarch_slurm.controller import HostsMissingError, gather_hosts

    def still_hope() -> str | None:
        return "some have failed" if failed_hosts(folder).keys() & set(names) else None

    try:
        return gather_hosts(names, timeout=timeout, still_hope=still_hope)
    except HostsMissingError as error:
        failed = [name for name in names if name in failed_hosts(folder)]
        problem = f"the agents of {len(failed)} of {len(names)} hosts could not start" if failed else str(error)
        raise host_problem(folder, failed or names, problem) from None


def why_ended(folder: JobFolder, status: JobStatus) -> JobError:
    """Return the error that says why a job ended without an exit code of its program."""
    if not folder.batch_log.exists():  # slurmd makes it before anything runs
        if not status.exit_code:
            return JobEndedError(str(status))
        return JobFolderError(
            f"{status}, and Slurm wrote nothing into {folder.path}: if the job did start, its node cannot write there; "
            "choose a folder on a file system that all nodes share (log_dir)"
        )
    text = f"{status}; its files are in {folder.path}"
    if said := tail(folder.batch_log):
        text += f"\n  last lines of {folder.batch_log.name}:\n{said}"
    return JobEndedError(text + _quote_hosts(folder, failed_hosts(folder)))


def _quote_hosts(folder: JobFolder, hosts: Iterable[str]) -> str:
    text = ""
    for host in list(hosts)[:MAX_QUOTED_HOSTS]:
        if said := tail(folder.host_log(host)):
            text += f"\n  last lines of logs/{host}.log:\n{said}"
    return text
