"""How a program becomes the controller of a job of Slurm: learn the job's nodes, tell its address, gather hosts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import TracebackType

from monarch_slurm.host.identity import ADDRESS_VARIABLE
from monarch_slurm.job.address import find_address, node_address
from monarch_slurm.job.allocation import SlurmAllocation
from monarch_slurm.job.base import JobState
from monarch_slurm.job.batch import BatchPlan
from monarch_slurm.job.diagnosis import why_ended
from monarch_slurm.job.errors import HostsTakenError, JobEndedError, JobError
from monarch_slurm.job.folder import FOLDER_VARIABLE, JobFolder
from monarch_slurm.job.follow import print_notice
from monarch_slurm.job.nodelist import expand
from monarch_slurm.job.request import SlurmRequest
from monarch_slurm.job.status import JobId, query, wait_for_start
from monarch_slurm.job.supervisor import BATCH_VARIABLE
from monarch_slurm.job.whole import Gathering


def connect(
    job_id: JobId | None,
    folder: JobFolder,
    sizes: Mapping[str, int],
    request: SlurmRequest,
    plan: BatchPlan,
    start_timeout: float | None,
) -> JobState:
    """Wait for a job and its hosts; return the meshes.

    Args:
        job_id: Slurm's number of the job; inside of it, that of the allocation is taken.
        sizes: number of hosts of each mesh.
        request: what the job has asked for.
        plan: for further nodes of the job.
        start_timeout: seconds to wait in the queue; None waits without limit.

    Raises:
        HostsTakenError: another program has been the job's controller.
        JobError: the job has ended, has other nodes than it asked for, or its hosts did not start.
    """
    try:
        return _connect(job_id, folder, sizes, request, plan, start_timeout)
    except JobError as error:
        if is_inside(folder):
            _print_plainly(error)
        raise


def _print_plainly(error: JobError) -> None:
    """Have ``error`` printed as one message, as the commands do, if the program ends by it; not under a traceback.

    What follows a job shows the program's output, and a traceback of this package says nothing of what to change.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        if value is error:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            before(kind, value, traceback)

    sys.excepthook = hook


def _connect(
    job_id: JobId | None,
    folder: JobFolder,
    sizes: Mapping[str, int],
    request: SlurmRequest,
    plan: BatchPlan,
    start_timeout: float | None,
) -> JobState:
    from monarch_slurm.controller import publish

    if is_inside(folder):
        allocation = SlurmAllocation.from_env()
        job_id = allocation.command_id
        names, here = list(allocation.nodes), allocation.node_name
    elif job_id is None:
        raise JobError("this job has not been submitted; call apply() or state() first")
    else:
        names, here = expand(_wait_for_start(job_id, folder, start_timeout)), ""
    if len(names) != request.all_nodes:
        raise JobError(f"{request.all_nodes} nodes were asked for, and job {job_id} has {len(names)}")
    if folder.controller_file.exists():
        raise HostsTakenError(f"the hosts of job {job_id} already serve another program; submit a job of your own")
    # toward another node, for a machine's own name may stand for its loopback address
    toward = node_address(next((name for name in names if name != here), here))
    publish(folder.path, address=find_address(request.address, toward))
    if request.data_address != request.address:
        os.environ.setdefault(ADDRESS_VARIABLE, find_address(request.data_address, toward))  # of this very process
    return JobState(Gathering(folder, names, sizes, request, plan).meshes())


def is_inside(folder: JobFolder) -> bool:
    """Return whether this process is the client script of the job with this folder."""
    return BATCH_VARIABLE in os.environ and os.environ.get(FOLDER_VARIABLE) == str(folder.path)


def _wait_for_start(job_id: JobId, folder: JobFolder, timeout: float | None) -> str:
    """Return the list of the job's nodes, once it has them."""
    try:
        return wait_for_start(job_id, timeout, print_notice).nodes
    except JobEndedError:
        raise why_ended(folder, query(job_id)) from None
