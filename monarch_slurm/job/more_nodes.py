"""Asking Slurm for one more node in the place of a lost one: a small job, whose host joins the controller of the first.

Its tasks read the first job's folder for the controller's address and keys, and end when that says that the program has
ended. What still waits in the queue then is cancelled, by the program and by the supervisor of the batch script.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from monarch_slurm.config import settings
from monarch_slurm.job.batch import BatchPlan
from monarch_slurm.job.errors import HostStartError, JobError, JobNotFoundError, NodeListError, SlurmUnreachableError
from monarch_slurm.job.folder import JobFolder
from monarch_slurm.job.head import ask_quickly
from monarch_slurm.job.nodelist import compress, expand
from monarch_slurm.job.request import SlurmRequest
from monarch_slurm.job.requested import cancel_waiting, new_request_folder
from monarch_slurm.job.sick import leave_out_sick
from monarch_slurm.job.status import Phase, query, wait_for_start
from monarch_slurm.job.submission import submit
from monarch_slurm.owned_files import write_whole
from monarch_slurm.wire.task_limits import start_thread

if TYPE_CHECKING:
    from monarch_slurm.actor.stand_ins import Pool
    from monarch_slurm.host import HostDown

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""Pause between two looks whether a node that Slurm has given has joined."""


class NodeRequests:
    """Asks for nodes in the places of lost ones.

    Args:
        request: what the job has asked for, of nodes of the lost one's kind.
        plan: of its batch script.
        folder: of the job.
        nodes: names of its nodes; those that come are added.
    """

    def __init__(self, request: SlurmRequest, plan: BatchPlan, folder: JobFolder, nodes: set[str]) -> None:
        self._request = request
        self._plan = replace(plan, program=None, joins=str(folder.path))
        self._folder = folder
        self._nodes = nodes
        self.pool: Pool | None = None
        atexit.register(cancel_waiting, folder)

    def __call__(self, down: HostDown, place: str) -> None:
        """Ask for a node in the place of a lost host, without waiting."""
        arguments = (down.host_name, place)
        start_thread(threading.Thread(target=self._ask, args=arguments, name="monarch-more-nodes", daemon=True))

    def _ask(self, lost: str, place: str) -> None:
        from monarch_slurm.actor.client import client

        try:
            job_id = self._submit()
            logger.warning("host %s is lost: asking Slurm for another node, by job %s", lost, job_id)
            status = wait_for_start(job_id, None, lambda text: logger.warning("%s", text))
            name = expand(status.nodes)[0]
            self._nodes.add(name)
            assert self.pool is not None
            self.pool.names.add(name)
            client().fill_places()
            self._watch(job_id, name)
        except (JobError, NodeListError) as error:
            client().abandon(place, f"no other node came: {error}")

    def _submit(self) -> int:
        folder = new_request_folder(self._folder)
        small = leave_out_sick(small_request(self._request, self._nodes), self._folder.path.parent)
        job_id = int(submit(small, folder, self._plan))
        write_whole(folder.path / "job_id", f"{job_id}\n".encode())
        return job_id

    def _watch(self, job_id: int, name: str) -> None:
        """Return when the host has joined.

        Raises:
            JobError: its job has ended before, or the host has not joined in time.
        """
        from monarch_slurm.actor.client import client

        seconds = settings().host_join_timeout
        deadline = time.monotonic() + seconds
        while name not in {info.name for info in client().joined}:
            with contextlib.suppress(SlurmUnreachableError):
                status = query(job_id, ask_quickly)
                if status.phase in (Phase.ENDING, Phase.ENDED):
                    raise JobNotFoundError(f"{status}; look at {self._folder.host_log(name)}")
            if time.monotonic() > deadline:
                with contextlib.suppress(SlurmUnreachableError):
                    ask_quickly(["scancel", str(job_id)])
                raise HostStartError(
                    f"host {name} of job {job_id} did not join within {seconds:g} s; look at "
                    f"{self._folder.host_log(name)}"
                )
            time.sleep(LOOK_SECONDS)


def small_request(request: SlurmRequest, nodes: Iterable[str]) -> SlurmRequest:
    """Return the request for one more node like those of ``request``, but none of ``nodes``."""
    return replace(
        request,
        nodes=1,
        spares=0,
        job_name=f"{request.job_name}-more",
        nodelist=None,
        dependency=None,
        requeue=False,
        exclude=compress(sorted({*expand(request.exclude or ""), *nodes})),
    )
