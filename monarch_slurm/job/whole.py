"""A job's meshes of hosts, whole: hosts that do not start or are not fit are left out in favour of spares."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from monarch_slurm.config import settings
from monarch_slurm.job.batch import BatchPlan
from monarch_slurm.job.diagnosis import failed_hosts, gather_or_explain
from monarch_slurm.job.errors import UnfitHostError
from monarch_slurm.job.folder import JobFolder
from monarch_slurm.job.more_nodes import NodeRequests
from monarch_slurm.job.request import SlurmRequest
from monarch_slurm.job.sick import NOT_STARTED_SECONDS, SILENT_SECONDS, note_joined, note_sick, note_silent
from monarch_slurm.wire.task_limits import start_thread

if TYPE_CHECKING:
    from monarch_slurm.actor import HostMesh
    from monarch_slurm.host import HostDown

logger = logging.getLogger(__name__)

SLOW_SECONDS = 15.0
"""A host whose agent starts so much later than the others is left out if there is a spare; then it is one itself."""

_LOOK_SECONDS = 0.5
_NOT_STARTED = "its agent did not start"


class Gathering:
    """Gathers the hosts of a job.

    Args:
        folder: of the job.
        names: of all its hosts, one kind after the other; of each those beyond the meshes' sizes are spares.
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
        self._used: list[str] = []
        self._kinds: dict[str, int] = {}
        left = list(names)
        for kind, (used, spares) in enumerate(request.kinds):
            self._used += left[:used]
            self._kinds |= dict.fromkeys(left[: used + spares], kind)
            left = left[used + spares :]
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
        if check or (check is None and len(self._names) > len(self._used)):
            self._examine()
        meshes, left = {}, list(self._used)
        for name, size in self._sizes.items():
            meshes[name] = self._gather(left[:size])
            left = left[size:]
        on_lost = self._request.on_lost
        known = set(self._names)
        kinds = len(self._request.kinds)
        for kind in range(kinds):
            spares = [name for name in self._names if name not in self._used and name not in self.unfit]
            its_spares = [name for name in spares if self._kinds[name] == kind]
            its_meshes = [*meshes.values()] if kinds == 1 else [[*meshes.values()][kind]]
            ask = None
            if on_lost == "request":
                ask = NodeRequests(self._request.of_kind(kind), self._plan, self._folder, known)
            pool = keep_whole(its_meshes, its_spares, on_lost, ask)
            pool.unfit |= self.unfit.keys()
            pool.note = self._note_lost
            if ask is not None:
                ask.pool = pool
        if self.unfit:
            not_started = {name: why for name, why in self.unfit.items() if why == _NOT_STARTED}
            note_sick(self._base, not_started, NOT_STARTED_SECONDS)
            note_sick(self._base, {name: why for name, why in self.unfit.items() if name not in not_started})
        return meshes

    def _note_lost(self, down: HostDown) -> None:
        """Remember a node that fell silent, until it joins again; one whose agent was ended is well."""
        if down.silent:
            start_thread(threading.Thread(target=self._watch_silent, args=(down,), name="monarch-sick", daemon=True))

    def _watch_silent(self, down: HostDown) -> None:
        from monarch_slurm.actor.client import client

        note_silent(self._base, down.host_name, down.cause)
        here = client()

        def is_back() -> bool:
            return any(info.name == down.host_name and info.host != down.host for info in here.joined)

        with here.hosts_changed:
            back = here.hosts_changed.wait_for(is_back, SILENT_SECONDS[0])
        if back:
            note_joined(self._base, down.host_name)

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
            if slow is None and not Counter(map(self._kinds.get, missing)) - Counter(map(self._kinds.get, free)):
                slow = now + SLOW_SECONDS
            for name in missing:
                if name in failed or (slow is not None and now >= slow):
                    self._swap(name, free, _NOT_STARTED if name in failed else "")
            hopeful = {self._kinds[name] for name in coming}
            hopeless = [n for n in missing if n in failed and n in self._used and self._kinds[n] not in hopeful]
            if hopeless or now >= deadline:
                self._gather(self._used, 0.0)  # says why
            with here.hosts_changed:
                here.hosts_changed.wait(_LOOK_SECONDS)

    def _swap(self, name: str, free: list[str], why: str) -> bool:
        """Use one of ``free`` of the same kind in place of ``name``; without a reason that is a spare itself once it is
        there. Return whether there is one.
        """
        spare = next((other for other in free if self._kinds[other] == self._kinds[name]), None)
        if spare is None:
            return False
        free.remove(spare)
        logger.warning("host %s is left out%s: %s takes its place", name, f" ({why})" if why else "", spare)
        if why:
            self.unfit[name] = why
        self._used[self._used.index(name)] = spare
        return True

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
            if self._swap(name, free, why):
                continue
            if self._request.on_lost == "fail":
                raise UnfitHostError(f"host {name} is not fit, and no spare is left: {why}")
            logger.warning("host %s is not fit, and no spare is left, so it is used: %s", name, why)
