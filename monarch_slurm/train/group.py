"""The collectives between replicas: Gloo on a given address, left at once when a member is gone."""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]
from torch.distributed import ProcessGroupGloo as GlooBackend

# As in transfer.py: whichever module loads the library first.
os.environ.setdefault("RUST_LOG", "warn")

from torchft.process_group import ProcessGroupGloo

from monarch_slurm.collectives.errors import ProofError
from monarch_slurm.collectives.proof import agree_on_secret, prove
from monarch_slurm.train.meeting import Meeting
from monarch_slurm.train.torchft_manager import connect


class _Work:
    """A collective under way, which can be let go of although TorchFT still refers to it, or waits in it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.waiting_since: float | None = None
        self._over = over = threading.Event()
        inner.get_future().add_done_callback(lambda _: over.set())

    def wait(self) -> Any:
        self.waiting_since = time.monotonic()
        self._over.wait()
        self.waiting_since = None
        # The inner work never becomes a local name: the traceback of a failure is kept, and its frames with it.
        if self.inner is None:
            raise ConnectionError("this replica left the group after a failure")
        return self.inner.wait()

    def drop(self) -> None:
        self.inner = None
        self._over.set()

    def get_future(self) -> Any:
        return self.inner.get_future()


class ReplicaGroup(ProcessGroupGloo):  # type: ignore[misc]  # torchft has no types
    """Gloo between replicas, on one given address rather than on an interface chosen by name or by host name.

    When a member dies, only those that exchange data with it directly notice: in a ring, its two neighbours. The others
    wait for the neighbours, who have given up, until the collective times out. So whoever notices has to `hang_up`,
    which lets the failure run round the ring in milliseconds. Gloo has no call for that; it closes its sockets when
    the last reference to any of its collectives is gone, hence `_Work`.

    Before the first collective the members prove to each other that they have met at the same store. If one does not,
    nothing else is sent, and the next quorum makes another group.

    Args:
        address: IP address that the sockets are bound to.
        timeout: seconds that a collective may take.
        connect_timeout: seconds that the members of a new quorum may take to connect to one another.
        meeting: where they meet.

    Attributes:
        quorum_id: number of the quorum that the group was last made for; -1 before the first.
        unproved: quorums in a row in which a member did not prove that it belongs to it.
    """

    def __init__(self, address: str, timeout: float, connect_timeout: float, meeting: Meeting) -> None:
        super().__init__(timeout=timedelta(seconds=timeout))
        self.meeting = meeting
        self._address = address
        self._connect_timeout = timedelta(seconds=connect_timeout)
        self._works: list[_Work] = []
        self._left: list[tuple[Any, list[Any]]] = []
        self._name = ""
        self.quorum_id = -1
        self.unproved = 0

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int, *more: Any, **named: Any) -> None:
        """Connect to the members of a new quorum.

        Raises:
            ProofError: a member did not prove that it belongs to the quorum. All connections are closed.
            RuntimeError: a member did not come within the time for it.
        """
        self.hang_up()
        self._name = replica_id
        self._left = [left for left in self._left if not all(inner.is_completed() for inner in left[1])]
        self.quorum_id = named["quorum_id"] if "quorum_id" in named else more[0]
        if self.meeting.store is None:
            super().configure(store_addr, replica_id, rank, world_size, *more, **named)
        else:
            connect(self, self.meeting.begin(store_addr), rank, world_size)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Begin to reduce over the members; `hang_up` cancels it."""
        self._works = [work for work in self._works if work.inner is not None and not work.inner.is_completed()]
        self._works.append(_Work(super().allreduce(tensors, opts)))
        return self._works[-1]

    def hang_up(self) -> None:
        """Close the sockets to all members: collectives that they wait in with this replica fail at once."""
        for work in self._works:
            work.drop()
        self._works.clear()
        self.abort()

    def let_go(self, patience: float) -> bool:
        """Free a thread that has waited in a collective for ``patience`` seconds, as a failure; tell if there was one.

        For any thread that knows that a member has fallen silent: its host is lost or its network cut, so that no
        broken connection tells. Gloo's own thread stays in that collective until it times out, and its group would wait
        for that thread if it were destroyed now; so both are kept until then.
        """
        now = time.monotonic()
        works = list(self._works)
        if not any(work.waiting_since is not None and now - work.waiting_since >= patience for work in works):
            return False
        self._left.append((self._pg, [work.inner for work in works if work.inner is not None]))
        self.hang_up()
        return True

    def _create_pg(self, store: Store, rank: int, world_size: int) -> ProcessGroup:
        backend, failure = self._connect(store, rank, world_size)
        if backend is None:
            self.unproved += 1
            raise ProofError(
                f"{self._name} at {self._address} on {socket.gethostname()} left quorum {self.quorum_id}: {failure}"
            )
        self.unproved = 0
        backend._set_default_timeout(self._timeout)
        backend._set_sequence_number_for_group()
        kind = ProcessGroup.BackendType.GLOO
        group = ProcessGroup(store, rank, world_size)
        group._set_default_backend(kind)
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            group._register_backend(torch.device(device), kind, backend)
        return group

    def _connect(self, store: Store, rank: int, world_size: int) -> tuple[Any, str]:
        """Return the group; or None and what is wrong, if a member did not prove that it belongs to it.

        An exception would refer to the group, whose sockets would stay open as long as somebody keeps it.
        """
        options = GlooBackend._Options()  # type: ignore[attr-defined]
        options._devices = [GlooBackend.create_device(hostname=self._address)]
        # A member that died since the quorum formed is waited for in vain: that may not take as long as a collective.
        options._timeout = self._connect_timeout
        backend = GlooBackend(store, rank, world_size, options)
        if world_size > 1:
            try:
                prove(backend, rank, world_size, agree_on_secret(store), f"quorum {self.quorum_id}")
            except ProofError as error:
                return None, str(error)
        return backend, ""
