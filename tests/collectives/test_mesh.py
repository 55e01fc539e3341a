"""Communicators over a mesh of real procs, made, used, aborted after a kill, and made anew among the survivors."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support import hold, wait_until

torch = pytest.importorskip("torch")

from monarch_slurm.actor import Actor, ActorError, RestartPolicy, endpoint, this_host  # noqa: E402
from monarch_slurm.collectives import CollectiveError, Communicator, PeerLostError  # noqa: E402
from monarch_slurm.collectives.keeper import Keeper  # noqa: E402


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
    def expect_from(self, peer: int) -> None:
        self.expected = self.group.local().recv(torch.ones(1), peer)

    @endpoint
    def wait_for_it(self) -> str:
        try:
            self.expected.wait(30)
        except PeerLostError as error:
            return f"{error.rank}: {error.reason}"
        return "through"

    @endpoint
    def wait_for(self, peer: int) -> str:
        try:
            self.group.local().recv(torch.ones(1), peer).wait(30)
        except PeerLostError as error:
            return f"{error.rank}: {error.reason}"
        return "through"

    @endpoint
    def rank_and_size(self) -> tuple[int, int]:
        comm = self.group.local()
        return comm.rank, comm.size

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


@pytest.fixture
def goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed procs are what these tests are about: the program goes on."""
    monkeypatch.setattr("monarch_slurm.actor.unhandled_fault_hook", lambda failure: None)


@pytest.mark.usefixtures("goes_on")
def test_a_killed_peer_is_named_to_all_who_wait_and_the_others_go_on() -> None:
    procs = this_host().spawn_procs({"gpus": 3})
    group = Communicator.create(procs, backend="gloo")
    workers = procs.spawn("workers", Worker, group)
    workers.total.call(1.0).get()
    victim = workers.slice(gpus=1).pid.call_one().get()
    waiting = [workers.slice(gpus=rank).wait_for_all.call_one() for rank in (0, 2)]
    os.kill(victim, signal.SIGKILL)
    for answer in waiting:
        text = answer.get(timeout=30)
        assert text.startswith("1: "), text
        assert "Killed(sig=9)" in text, text
    group.remake()
    assert group.groups == [[0, 2]]
    totals = [workers.slice(gpus=rank).total.call_one(1.0) for rank in (0, 2)]
    assert [total.get(timeout=30) for total in totals] == [(0, 2, 2.0), (1, 2, 2.0)]

    # Who waits in close() is told, too.
    victim = workers.slice(gpus=2).pid.call_one().get()
    workers.slice(gpus=0).expect_from.call_one(1).get(timeout=30)
    waits = workers.slice(gpus=0).wait_for_it.call_one()
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(group.close)
        left = workers.slice(gpus=2).rank_and_size
        wait_until(
            lambda: isinstance(left.call_one().exception(30), ActorError), "the last rank to have closed its end"
        )
        group._keeper(0).host.call_one().get(timeout=30)  # the close of the first is under way, too
        os.kill(victim, signal.SIGKILL)
        text = waits.get(timeout=30)
        assert text.startswith("1: "), text
        assert "Killed(sig=9)" in text, text
        with pytest.raises(CollectiveError, match="rank 1 of the communicator is lost"):
            closing.result(30)
    procs.stop().get()


@pytest.mark.usefixtures("goes_on")
def test_the_replacement_of_a_killed_peer_is_taken_in() -> None:
    procs = this_host().spawn_procs({"gpus": 2}, restart=RestartPolicy())
    group = Communicator.create(procs, backend="gloo")
    workers = procs.spawn("workers", Worker, group)
    victim = workers.slice(gpus=1).pid.call_one().get()
    waiting = workers.slice(gpus=0).wait_for_all.call_one()
    os.kill(victim, signal.SIGKILL)
    assert waiting.get(timeout=30).startswith("1: ")
    assert workers.slice(gpus=1).pid.call_one().get(timeout=60) != victim
    group.remake()
    assert group.groups == [[0, 1]]
    totals = [answer for _, answer in workers.total.call(1.0).get(timeout=30)]
    assert totals == [(0, 2, 2.0), (1, 2, 2.0)]
    procs.stop().get()


def test_nothing_waits_for_a_hung_proc_which_finds_itself_aborted_when_it_goes_on() -> None:
    procs = this_host().spawn_procs({"gpus": 3})
    group = Communicator.create(procs, backend="gloo")
    workers = procs.spawn("workers", Worker, group)
    hung = workers.slice(gpus=1).pid.call_one().get()
    waiting = [workers.slice(gpus=rank).wait_for_all.call_one() for rank in (0, 2)]
    hold(hung)
    try:
        group._timeout_s = 2.0  # for the first join it would be too short on a busy machine
        with pytest.raises(CollectiveError, match=r"no answer from mesh rank .*if it hangs, leave it out"):
            group.remake()
        group._timeout_s = 60.0
        with pytest.raises(ValueError, match="the mesh has the ranks 0 to 2"):
            group.remake(lost=[3])
        group.abort("makes no progress", rank=1)
        assert [answer.get(timeout=30) for answer in waiting] == ["1: makes no progress"] * 2
        group.remake()
        totals = [workers.slice(gpus=rank).total.call_one(1.0) for rank in (0, 2)]
        assert [total.get(timeout=30) for total in totals] == [(0, 2, 2.0), (1, 2, 2.0)]
    finally:
        os.kill(hung, signal.SIGCONT)
    group._keeper(1).host.call_one().get(timeout=60)  # what it was told before is through
    assert workers.slice(gpus=1).wait_for.call_one(0).get(timeout=30) == "1: makes no progress"
    # The new communicator goes on beside it, and its ranks are counted in it, not in the first one.
    workers.slice(gpus=0).expect_from.call_one(1).get(timeout=30)
    group.remake(lost=[2])
    assert workers.slice(gpus=0).wait_for_it.call_one().get(timeout=30) == "1: left out of what was made anew"
    assert workers.slice(gpus=0).total.call_one(1.0).get(timeout=30) == (0, 1, 1.0)
    group.close()
    procs.stop().get()


@pytest.mark.usefixtures("goes_on")
def test_a_peer_that_dies_before_it_has_joined() -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    keepers = procs.spawn("keepers", Keeper)
    first = keepers.slice(gpus=0)
    pids = procs.spawn("pids", Worker, None)
    processes = [process for _, (_, _, process) in keepers.host.call().get().items()]
    invitation = first.invite.call_one("name", "gloo", "127.0.0.1").get()
    joining = first.join.call_one("name", invitation, 0, processes, 600.0)
    first.host.call_one().get()  # the join is under way
    os.kill(pids.slice(gpus=1).pid.call_one().get(), signal.SIGKILL)
    with pytest.raises(ActorError, match="rank 1 of the communicator is lost"):
        joining.get(timeout=30)
    procs.stop().get()
