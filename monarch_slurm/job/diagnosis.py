"""Why a job ended or a host did not come up, from what lies in the job's folder."""

from __future__ import annotations

import re
from collections.abc import Iterable

from monarch_slurm.job.errors import HostStartError, JobEndedError, JobError, JobFolderError
from monarch_slurm.job.folder import JobFolder, tail
from monarch_slurm.job.status import JobStatus

MAX_QUOTED_HOSTS = 3

_HOST_FAILED = re.compile(r" host (\S+) has failed: (.+)$", re.MULTILINE)


def failed_hosts(folder: JobFolder) -> dict[str, str]:
    """Return the hosts that are not started again, with the reason that `monarch_slurm.job.steps` tells."""
    try:
        said = folder.batch_log.read_text(errors="replace")
    except OSError:
        return {}
    return dict(_HOST_FAILED.findall(said))


def host_problem(folder: JobFolder, hosts: Iterable[str], problem: str) -> HostStartError:
    """Return the error that says ``problem`` of ``hosts``, with the last lines of their logs."""
    failed = failed_hosts(folder)
    ended = "".join(f"\n  host {host} has failed: {failed[host]}" for host in hosts if host in failed)
    return HostStartError(f"{problem}{ended}{_quote_hosts(folder, hosts)}")


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
