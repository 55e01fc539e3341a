"""A job's meshes of hosts, whole: hosts that do not start or are not fit are left out in favour of spares."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from monarch_slurm.config import settings
from monarch_slurm.host.exits import SILENT
from monarch_slurm.job.batch import BatchPlan
from monarch_slurm.job.diagnosis import failed_hosts, gather_or_explain
from monarch_slurm.job.errors import UnfitHostError
from monarch_slurm.job.folder import JobFolder
from monarch_slurm.job.more_nodes import NodeRequests
from monarch_slurm.job.request import SlurmRequest
from monarch_slurm.job.sick import note_sick

if TYPE_CHECKING:
    from monarch_slurm.actor import HostMesh
    from monarch_slurm.host import HostDown

logger = logging.getLogger(__name__)

SLOW_SECONDS = 15.0
"""A host whose agent starts so much later than the others is left out if there is a spare; then it is one itself."""

_LOOK_SECONDS = 0.5


class Gathering:
    """Gathers the hosts of a job.

    Args:
        folder: of the job.
        names: of all its hosts; those beyond the meshes' sizes are spares.
        sizes: number of hosts of each mesh.
        request: what the job has asked for.
        plan: of its batch script.
    """

    def __init__(
        self,
        folder: JobFolder,
        names: Sequence[str],
        sizes: Mapping[str, int],
        request: SlurmRequest,
        plan: BatchPlan,
    ) -> None:
        self._folder = folder
        self._names = list(names)
        self._sizes = sizes
        self._request = request
        self._plan = plan
        self._base = folder.path.parent
        self._used = self._names[: sum(sizes.values())]
        self.unfit: dict[str, str] = {}
        """Hosts that are left out, and why."""

    def meshes(self) -> dict[str, HostMesh]:
        """Return the meshes, and keep them whole from now on.

        Raises:
            HostStartError: hosts did not start, and there are not spares enough.
            UnfitHostError: hosts are not fit, there are not spares enough, and the job is to fail then.
        """
        from monarch_slurm.controller import keep_whole

        self._await_agents()
        check = self._request.health_check
        if check or (check is None and self._request.spares):
            self._examine()
        meshes, left = {}, list(self._used)
        for name, size in self._sizes.items():
            meshes[name] = self._gather(left[:size])
            left = left[size:]
        on_lost = self._request.on_lost
        spares = [name for name in self._names if name not in self._used and name not in self.unfit]
        ask = NodeRequests(self._request, self._plan, self._folder, self._names) if on_lost == "request" else None
        pool = keep_whole(meshes.values(), spares, on_lost, ask)
        pool.unfit |= self.unfit.keys()
        pool.note = self._note_lost
        if self.unfit:
            note_sick(self._base, self.unfit)
        if ask is not None:
            ask.pool = pool
        return meshes

    def _note_lost(self, down: HostDown) -> None:
        """Remember a node that fell silent; one whose agent was ended is well."""
        if down.cause.startswith(SILENT):
            sick = {down.host_name: down.cause}
            threading.Thread(target=note_sick, args=(self._base, sick), name="monarch-sick", daemon=True).start()

    def _gather(self, names: Sequence[str], timeout: float | None = None) -> HostMesh:
        return gather_or_explain(self._folder, names, settings().host_join_timeout if timeout is None else timeout)

    def _await_agents(self) -> None:
        if len(self._names) == len(self._used):
            self._gather(self._used)
            return
        from monarch_slurm.actor.client import client

        here = client()
        deadline = time.monotonic() + settings().host_join_timeout
        slow: float | None = None
        while True:
            with here.hosts_changed:
                joined = {info.name for info in here.joined}
            missing = [name for name in self._used if name not in joined]
            if not missing:
                return
            failed = failed_hosts(self._folder).keys()
            now = time.monotonic()
            free = [name for name in self._names if name in joined and name not in self._used]
            coming = [name for name in self._names if name not in {*joined, *self._used, *failed}]
            if len(free) >= len(missing) and slow is None:
                slow = now + SLOW_SECONDS
            for name in missing:
                if free and (name in failed or (slow is not None and now >= slow)):
                    self._swap(name, free.pop(0), "its agent did not start" if name in failed else "")
            hopeless = [name for name in missing if name in failed and name in self._used] and not coming
            if hopeless or now >= deadline:
                self._gather(self._used, 0.0)  # says why
            with here.hosts_changed:
                here.hosts_changed.wait(_LOOK_SECONDS)

    def _swap(self, name: str, spare: str, why: str) -> None:
        """Use ``spare`` in place of ``name``; without a reason it is a spare itself once it is there."""
        logger.warning("host %s is left out%s: %s takes its place", name, f" ({why})" if why else "", spare)
        if why:
            self.unfit[name] = why
        self._used[self._used.index(name)] = spare

    def _examine(self) -> None:
        from monarch_slurm.actor.client import client
        from monarch_slurm.health import BAD, check_hosts

        here = client()
        with here.hosts_changed:
            joined = {info.name for info in here.joined}
        hosts = self._gather([name for name in self._names if name in joined])
        findings, _ = check_hosts(hosts, start_seconds=settings().preload_timeout)
        faults: dict[str, list[str]] = {}
        for finding in findings:
            if finding.level == BAD:
                advice = f"; {finding.advice}" if finding.advice else ""
                faults.setdefault(finding.host, []).append(f"{finding.check}: {finding.value}{advice}")
        free = [n for n in self._names if n in joined and n not in self._used and n not in faults]
        self.unfit |= {name: "; ".join(faults[name]) for name in faults if name not in self._used}
        for name in [name for name in self._used if name in faults]:
            why = "; ".join(faults[name])
            if free:
                self._swap(name, free.pop(0), why)
            elif self._request.on_lost == "fail":
                raise UnfitHostError(f"host {name} is not fit, and no spare is left: {why}")
            else:
                logger.warning("host %s is not fit, and no spare is left, so it is used: %s", name, why)
