"""Keeping the host meshes of a job whole: spares take the places of hosts that are lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from monarch_slurm.actor import HostMesh
from monarch_slurm.actor.client import client
from monarch_slurm.actor.stand_ins import Pool
from monarch_slurm.host import HostDown
from monarch_slurm.host.places import OnLost

logger = logging.getLogger(__name__)

SPARE_SECONDS = 10.0
"""Time that spares have to join after the hosts that are used; who comes later is a spare from then on."""


def keep_whole(
    meshes: Iterable[HostMesh],
    spares: Sequence[str] = (),
    on_lost: OnLost = "shrink",
    request: Callable[[HostDown, str], None] | None = None,
    names: Iterable[str] = (),
) -> Pool:
    """Have other hosts take the places of those of ``meshes`` that are lost.

    Args:
        spares: names of hosts that were started as spares. They are waited for, but not for long.
        on_lost: what to do when none is left.
        request: asks for one more host. Its name is to be added to the pool's, and `Client.fill_places` called.
        names: names of further hosts that may take a place when they join.
    """
    here = client()
    meshes = list(meshes)
    deadline = time.monotonic() + SPARE_SECONDS

    def missing() -> set[str]:
        return set(spares) - {info.name for info in here.joined}

    with here.hosts_changed:
        here.hosts_changed.wait_for(lambda: not missing(), max(0.0, deadline - time.monotonic()))
    if late := missing():
        logger.warning("spare hosts that have not joined yet: %s", ", ".join(sorted(late)))
    placed = {host for mesh in meshes for host in mesh._now_at()}
    used = {host.partition("#")[0] for host in placed}
    pool = Pool({*used, *spares, *names}, placed, on_lost, request)
    here.look_after(pool)
    return pool
