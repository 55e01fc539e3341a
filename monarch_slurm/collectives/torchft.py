"""TorchFT's process group between replicas, on this package's communicators.

    from monarch_slurm.collectives.torchft import ProcessGroupMonarch
    manager = torchft.Manager(pg=ProcessGroupMonarch(timeout=timedelta(seconds=30)), ...)

It takes the place of ``torchft.ProcessGroupNCCL``. Made in an endpoint of an actor, it is told by the control plane
when the process of a peer dies: within milliseconds the operations that wait for it end, and the step is not committed.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torchft.process_group import ProcessGroupWrapper

from monarch_slurm.collectives.c10d import BACKEND, Group, current_runtime, join_group
from monarch_slurm.collectives.errors import CollectiveError


class ProcessGroupMonarch(ProcessGroupWrapper):  # type: ignore[misc]  # torchft has no types
    """Collectives of GPU tensors among the replicas of a quorum; each quorum makes a new communicator.

    Args:
        timeout: how long an operation may take; then the group is aborted.
        join_timeout: how long a rank waits for the others when a quorum is made; None: ``timeout``.

    Attributes:
        group: of the last quorum; None before the first, or if it could not be made.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60), *, join_timeout: timedelta | None = None) -> None:
        super().__init__(timeout)
        self._join_timeout = join_timeout or timeout
        self._runtime = current_runtime()
        self.group: Group | None = None

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name that torch shows."""
        return f"torchft-{BACKEND}"

    def abort(self, errored: bool = True) -> None:
        """End all operations, those that run included. The next quorum makes a new communicator."""
        group = self.group
        if group is not None:
            group.transport.abort(CollectiveError("the process group was aborted"))
        self._pg = None
        if not errored:
            self.group = None  # a new one is about to be made: what became of this one is of no interest

    def errored(self) -> Exception | None:
        """Return why the group has ended, once all that was enqueued is through; None while it lives."""
        torch.cuda.synchronize()
        failure = self.group.transport.failure() if self.group is not None else None
        return failure if isinstance(failure, Exception) else None

    def _create_pg(self, store: Any, rank: int, world_size: int) -> ProcessGroup:
        group = self.group = join_group(
            store, rank, world_size, self._timeout, self._runtime, join_timeout=self._join_timeout
        )
        made = ProcessGroup(store, rank, world_size)
        made._set_default_backend(ProcessGroup.BackendType.CUSTOM)
        made._register_backend(torch.device("cuda"), ProcessGroup.BackendType.CUSTOM, group.backend)
        return made
