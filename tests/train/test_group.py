"""A stranger who knows every address and port gets no part in the group of a quorum, and the next quorum has one."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from gloo_stranger import HEADS, join_behind_a_stranger
from support import DEADLINE

torch = pytest.importorskip("torch")
pytest.importorskip("torchft")

from torch.distributed import AllreduceOptions, PrefixStore, Store  # noqa: E402

from monarch_slurm.actor import context  # noqa: E402
from monarch_slurm.collectives import StoreActor  # noqa: E402
from monarch_slurm.collectives.errors import ProofError  # noqa: E402
from monarch_slurm.collectives.job_store import JobStore  # noqa: E402
from monarch_slurm.train.group import ReplicaGroup  # noqa: E402
from monarch_slurm.train.meeting import Meeting  # noqa: E402

CONNECT_S = 4.0


class Members:
    """The groups of two replicas in this process, which meet as replicas of a run do."""

    def __init__(self, *meetings: type[Meeting]) -> None:
        self.actor: Any = context().actor_instance.proc.spawn("store", StoreActor)
        self.quorum = 0
        self.groups = []
        for kind in meetings or (Meeting, Meeting):
            meeting = kind(None, CONNECT_S)
            meeting.store = self.actor
            self.groups.append(ReplicaGroup("127.0.0.1", DEADLINE, CONNECT_S, meeting))

    def configure(self, rank: int) -> None:
        self.groups[rank].configure(
            f"store/torchft/{self.quorum}/0", f"replica_{rank}:0", rank, len(self.groups), quorum_id=self.quorum
        )

    def form(self) -> list[BaseException | None]:
        """Form the next quorum; return what each raised."""
        self.quorum += 1
        with ThreadPoolExecutor(len(self.groups)) as pool:
            joining = [pool.submit(self.configure, rank) for rank in range(len(self.groups))]
            return [each.exception(DEADLINE) for each in joining]

    def total(self) -> list[float]:
        """Reduce a gradient of 1 MB."""
        tensors = [torch.ones(1 << 18) for _ in self.groups]
        works = [
            group.allreduce([tensor], AllreduceOptions()) for group, tensor in zip(self.groups, tensors, strict=True)
        ]
        for work in works:
            work.wait()
        return [float(tensor[-1]) for tensor in tensors]

    def close(self) -> None:
        for group in self.groups:
            group.hang_up()
        self.actor.stop().get(DEADLINE)


def test_a_stranger_in_the_place_of_a_late_member_gets_nothing_and_the_next_quorum_works() -> None:
    members = Members()
    taken = False
    # Whether rank 0 is the one that is connected to depends on the ports, which are ephemeral.
    for _ in range(30):
        members.quorum += 1
        errors, got = join_behind_a_stranger(members.configure)
        taken = got > 0
        if not taken:
            assert errors == [None, None]
            assert members.total() == [2.0, 2.0]
            continue
        assert got < HEADS
        assert isinstance(errors[0], ProofError)
        assert "replica_0:0 at 127.0.0.1 on " in str(errors[0])
        assert f"left quorum {members.quorum}: " in str(errors[0])
        assert "a process that is not of the job" in str(errors[0])
        assert isinstance(errors[1], ProofError | RuntimeError)
        assert members.groups[0].unproved == 1
        assert members.form() == [None, None]
        assert members.total() == [2.0, 2.0]
        assert members.groups[0].unproved == 0
        break
    members.close()
    assert taken, "the stranger never got the place"


class Uninvited(JobStore):
    """Of a rank that knows where the others meet, and not their secret."""

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return os.urandom(32).hex().encode()


class MeetingOfUninvited(Meeting):
    def begin(self, address: str) -> Store:
        super().begin(address)
        assert self.store is not None
        store = Uninvited(self.store, timedelta(seconds=CONNECT_S))
        return PrefixStore(self._prefix.rstrip("/"), store)


def test_a_member_without_the_secret_is_named() -> None:
    members = Members(Meeting, MeetingOfUninvited)
    for number in (1, 2):
        error, _ = members.form()
        assert isinstance(error, ProofError)
        assert "rank 1 of 2 did not prove to rank 0 of 2 on " in str(error)
        assert members.groups[0].unproved == number
    members.close()
