"""Where the members of a quorum meet to connect: in the keys of an actor of one of them."""

from __future__ import annotations

import contextlib
import contextvars
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from monarch_slurm.collectives import StoreActor
from monarch_slurm.collectives.job_store import JobStore


class Meeting:
    """The meetings of one rank. For any thread, though it is made on that of an actor.

    Args:
        own: the actor of this rank's replica; None if there is none, and members meet at TCP stores.
        timeout: seconds that a rank waits for the keys of the others.

    Attributes:
        store: the actor in whose keys the members of the present quorum meet.
    """

    def __init__(self, own: StoreActor | None, timeout: float) -> None:
        self._own, self._timeout = own, timedelta(seconds=timeout)
        self._made: dict[str, JobStore] = {}
        self._context = contextvars.copy_context()  # TorchFT connects on a thread of its own, which has no actor
        self.store: StoreActor | None = None
        self._prefix = ""

    def begin(self, address: str) -> Store:
        """Return the store for a new quorum, and drop the keys of the one before.

        Args:
            address: as TorchFT names the meeting: different for each quorum and for each rank of a replica.
        """
        assert self.store is not None
        if self._own is not None and self._prefix:
            with contextlib.suppress(DistError):  # rank 0 of this replica has ended, and its keys with it
                self._store_of(self._own).delete_prefix(self._prefix)
        # What comes before is the text of the actor, which is the same for all.
        self._prefix = address.partition("/torchft/")[2] + "/"
        return PrefixStore(self._prefix.rstrip("/"), self._store_of(self.store))

    def _store_of(self, actor: Any) -> JobStore:
        key = actor._ref.mesh
        if key not in self._made:
            self._made[key] = self._context.copy().run(JobStore, actor, self._timeout)
        return self._made[key]
