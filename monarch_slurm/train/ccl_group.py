"""The collectives between replicas on RCCL or NCCL: from GPU to GPU, over the fabric."""

from __future__ import annotations

import time
from collections import deque
from datetime import timedelta
from typing import Any

import torch

from monarch_slurm.collectives.torchft import ProcessGroupMonarch
from monarch_slurm.errors import ConfigError
from monarch_slurm.native_build import load_native
from monarch_slurm.train.meeting import Meeting
from monarch_slurm.train.native_modules import MODULES
from monarch_slurm.train.torchft_manager import connect


class CclReplicaGroup(ProcessGroupMonarch):
    """What `ReplicaGroup` is on Gloo.

    The control plane tells each member when another one's process dies, and what waits for it ends. A member that
    leaves without dying is waited for until the collective times out: over NVLink or xGMI nothing tells the others.

    Args:
        timeout: seconds that a collective may take.
        connect_timeout: seconds that the members of a new quorum may take to connect to one another.
        meeting: where they meet.

    Attributes:
        quorum_id: number of the quorum that the group was last made for; -1 before the first.

    Raises:
        ConfigError: this process has no GPU.
    """

    def __init__(self, timeout: float, connect_timeout: float, meeting: Meeting) -> None:
        self.meeting = meeting
        if not torch.cuda.is_available():
            raise ConfigError("--replica-backend ccl: RCCL and NCCL move memory of GPUs, and there is no GPU here")
        for name in MODULES:  # now, and not in the first quorum, where all peers would wait for the compiler
            load_native(name)
        super().__init__(timedelta(seconds=timeout), join_timeout=timedelta(seconds=connect_timeout))
        self._running: deque[tuple[float, Any]] = deque()
        self.quorum_id = -1

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int, *more: Any, **named: Any) -> None:
        """Connect to the members of a new quorum."""
        self._running.clear()
        self.quorum_id = named["quorum_id"] if "quorum_id" in named else more[0]
        if self.meeting.store is None:
            super().configure(store_addr, replica_id, rank, world_size, *more, **named)
        else:
            connect(self, self.meeting.begin(store_addr), rank, world_size)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Begin to reduce over the members; `hang_up` ends it."""
        work = super().allreduce(tensors, opts)
        group = self.group
        if group is not None:
            while self._running and self._running[0][1].query():
                self._running.popleft()
            self._running.append((time.monotonic(), group.stream.record_event()))
        return work

    def hang_up(self) -> None:
        """End the collectives that run here."""
        self.abort()

    def let_go(self, patience: float) -> bool:
        """See `ReplicaGroup.let_go`."""
        since = time.monotonic() - patience
        if not any(began <= since and not event.query() for began, event in list(self._running)):
            return False
        self.hang_up()
        return True
