"""A job's meshes of hosts, whole: hosts that do not start or are not fit are left out in favour of spares."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from monarch_slurm.config import settings
from monarch_slurm.host.places import OnLost
from monarch_slurm.job.diagnosis import failed_hosts, gather_or_explain
from monarch_slurm.job.errors import UnfitHostError
from monarch_slurm.job.folder import JobFolder

if TYPE_CHECKING:
    from monarch_slurm.actor import HostMesh
    from monarch_slurm.actor.stand_ins import Pool
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
        on_lost: what to do when no spare is left.
        health_check: whether the hosts are examined before they are used.
    """

    def __init__(
        self, folder: JobFolder, names: Sequence[str], sizes: Mapping[str, int], on_lost: OnLost, health_check: bool
    ) -> None:
        self._folder = folder
        self._names = list(names)
        self._sizes = sizes
        self._on_lost = on_lost
        self._health_check = health_check
        self._used = self._names[: sum(sizes.values())]
        self.unfit: dict[str, str] = {}
        """Hosts that are left out, and why."""

    def meshes(self, request: Callable[[HostDown, str], None] | None = None) -> tuple[dict[str, HostMesh], Pool]:
        """Return the meshes, and what keeps them whole.

        Args:
            request: asks for one more host; see `monarch_slurm.controller.keep_whole`.

        Raises:
            HostStartError: hosts did not start, and there are not spares enough.
            UnfitHostError: hosts are not fit, there are not spares enough, and the job is to fail then.
        """
        from monarch_slurm.controller import keep_whole

        self._await_agents()
        if self._health_check:
            self._examine()
        meshes, left = {}, list(self._used)
        for name, size in self._sizes.items():
            meshes[name] = self._gather(left[:size])
            left = left[size:]
        spares = [name for name in self._names if name not in self._used and name not in self.unfit]
        pool = keep_whole(meshes.values(), spares, self._on_lost, request)
        pool.unfit |= self.unfit.keys()
        return meshes, pool

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
        findings, _ = check_hosts(self._gather([name for name in self._names if name in joined]))
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
            elif self._on_lost == "fail":
                raise UnfitHostError(f"host {name} is not fit, and no spare is left: {why}")
            else:
                logger.warning("host %s is not fit, and no spare is left, so it is used: %s", name, why)
