"""Gloo groups that torch makes over the job's store, and strangers who come to them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from gloo_stranger import HEADS, join_behind_a_stranger
from support import DEADLINE

torch = pytest.importorskip("torch")

import torch.distributed.distributed_c10d as c10d  # noqa: E402
from torch.distributed import AllreduceOptions, HashStore, PrefixStore  # noqa: E402
from torch.distributed import ProcessGroupGloo as Gloo  # noqa: E402

from monarch_slurm.actor import context  # noqa: E402
from monarch_slurm.collectives import StoreActor  # noqa: E402
from monarch_slurm.collectives.errors import ProofError  # noqa: E402
from monarch_slurm.collectives.job_store import JobStore  # noqa: E402

TIMEOUT = timedelta(seconds=4)


class Groups:
    """Two ranks in this process, whose groups are made by what ``init_process_group`` calls."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.made: dict[int, Any] = {}

    def join(self, rank: int) -> None:
        self.made[rank] = c10d.ProcessGroupGloo(self.store, rank, 2, timeout=TIMEOUT)

    def sums(self) -> list[float]:
        tensors = [torch.ones(1), torch.ones(1)]
        works = [self.made[rank].allreduce([tensor], AllreduceOptions()) for rank, tensor in enumerate(tensors)]
        for work in works:
            work.wait()
        return [float(tensor) for tensor in tensors]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return JobStore(context().actor_instance.proc.spawn("store", StoreActor), TIMEOUT)


def test_a_stranger_in_the_place_of_a_late_rank_is_noticed(store: JobStore) -> None:
    # Whether rank 0 is the one that is connected to depends on the ports, which are ephemeral.
    for number in range(30):
        groups = Groups(PrefixStore(f"group{number}", store))
        errors, got = join_behind_a_stranger(groups.join)
        if got > 0:
            assert got < HEADS
            assert isinstance(errors[0], ProofError)
            assert "a process that is not of the job" in str(errors[0])
            assert isinstance(errors[1], ProofError | RuntimeError)
            return
        assert errors == [None, None]
        assert groups.sums() == [2.0, 2.0]
    pytest.fail("the stranger never got the place")


@pytest.mark.parametrize("over_the_job", [True, False])
def test_groups_are_torchs_own(store: JobStore, over_the_job: bool) -> None:
    groups = Groups(PrefixStore("group", store) if over_the_job else HashStore())
    with ThreadPoolExecutor(2) as pool:
        for joining in [pool.submit(groups.join, rank) for rank in range(2)]:
            joining.result(DEADLINE)
    assert groups.sums() == [2.0, 2.0]
    for group in groups.made.values():
        assert type(group) is Gloo
        assert isinstance(group, c10d.ProcessGroupGloo)
    assert not isinstance(store, c10d.ProcessGroupGloo)
    assert issubclass(Gloo, c10d.ProcessGroupGloo)
    assert c10d.ProcessGroupGloo.create_device is Gloo.create_device
