"""Communicators over a mesh of real procs, made, used, aborted after a kill, and made anew among the survivors."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from monarch_slurm.actor import Actor, endpoint, this_host  # noqa: E402
from monarch_slurm.collectives import CollectiveError, Communicator, PeerLostError  # noqa: E402


class Worker(Actor):
    def __init__(self, group: Any) -> None:
        self.group = group

    @endpoint
    def total(self, value: float) -> tuple[int, int, float]:
        comm = self.group.local()
        tensor = torch.full((3,), value)
        comm.all_reduce(tensor).wait(30)
        return comm.rank, comm.size, tensor[0].item()

    @endpoint
    def wait_for_all(self) -> str:
        try:
            self.group.local().barrier().wait(30)
        except PeerLostError as error:
            return f"{error.rank}: {error.reason}"
        return "through"

    @endpoint
    def pid(self) -> int:
        return os.getpid()


def test_over_one_dimension_of_two() -> None:
    procs = this_host().spawn_procs({"hosts": 2, "gpus": 2})
    group = Communicator.create(procs, dims=("gpus",), backend="gloo")
    assert group.groups == [[0, 1], [2, 3]]
    workers = procs.spawn("workers", Worker, group)
    answers = [answer for _, answer in workers.total.call(2.0).get()]
    assert answers == [(0, 2, 4.0), (1, 2, 4.0)] * 2
    with pytest.raises(CollectiveError, match="no end of the communicator"):
        group.local()
    group.close()
    procs.stop().get()


def test_a_killed_peer_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch_slurm.actor.unhandled_fault_hook", lambda failure: None)
    procs = this_host().spawn_procs({"gpus": 3})
    group = Communicator.create(procs, backend="gloo")
    workers = procs.spawn("workers", Worker, group)
    workers.total.call(1.0).get()
    victim = workers.slice(gpus=1).pid.call_one().get()
    waiting = [workers.slice(gpus=rank).wait_for_all.call_one() for rank in (0, 2)]
    os.kill(victim, signal.SIGKILL)
    group.abort("killed by signal 9", rank=1)
    assert [answer.get(timeout=30) for answer in waiting] == ["1: killed by signal 9"] * 2
    group.remake()
    totals = [workers.slice(gpus=rank).total.call_one(1.0) for rank in (0, 2)]
    assert [total.get(timeout=30) for total in totals] == [(0, 2, 2.0), (1, 2, 2.0)]
    procs.stop().get()
