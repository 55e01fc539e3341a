"""Collectives of CPU tensors between real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cases  # noqa: E402
import cloudpickle  # noqa: E402
import torch.distributed as dist  # noqa: E402
from rank_process import DEADLINE_S, start_rank  # noqa: E402
from torch.distributed.tensor import DTensor, Shard, init_device_mesh  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from monarch_slurm.collectives import (  # noqa: E402
    CollectiveError,
    Communicator,
    CommunicatorClosedError,
    PeerLostError,
    invite,
)

# What the ranks run is sent to them as it is: the module of a test cannot be imported there.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def start(body: Callable[..., Any], size: int) -> tuple[list[Any], list[Connection]]:
    invitation, _ = invite("gloo")
    started = [start_rank(body, invitation, rank, size) for rank in range(size)]
    return [process for process, _ in started], [pipe for _, pipe in started]


def answer(pipe: Connection) -> Any:
    assert pipe.poll(DEADLINE_S), "a rank did not answer"
    kind, value = pipe.recv()
    assert kind == "result", value
    return value


def on_ranks(body: Callable[..., Any], size: int) -> list[Any]:
    processes, pipes = start(body, size)
    results = [answer(pipe) for pipe in pipes]
    for process in processes:
        process.join()
    return results


@pytest.mark.parametrize("size", [1, 2, 3])
def test_reductions_are_the_float64_reference(size: int) -> None:
    checked = on_ranks(lambda comm, _: cases.check_reductions(comm), size)
    assert checked == [3 * (4 * 8 + 4) * 5] * size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_moves_are_bit_for_bit(size: int) -> None:
    checked = on_ranks(lambda comm, _: cases.check_moves(comm), size)
    assert checked == [6 * 13 * 5 + 2] * size


def _averages(comm: Communicator, _: Connection) -> int:
    for dtype in cases.FLOATS:
        limits = torch.finfo(dtype)
        mine = torch.tensor([limits.max, limits.min, limits.smallest_normal, limits.eps], dtype=dtype)
        if dtype != torch.float64:
            mine = torch.cat([mine, torch.tensor([limits.smallest_normal / 2], dtype=torch.float64).to(dtype)])
        tensor = mine.clone()
        comm.all_reduce(tensor, "avg").wait()
        cases.expect(f"avg of {dtype}", tensor, mine)
    return cases.check_rough_values(comm)


@pytest.mark.parametrize("size", [2, 3])
def test_averages_hold_what_float64_would(size: int) -> None:
    assert on_ranks(_averages, size) == [20] * size


def test_a_rank_may_come_later_than_it_may_join_and_groups_may_be_nested() -> None:
    invitation, _ = invite("gloo")
    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(lambda rank: Communicator.join(invitation, rank, 2, timeout_s=4), range(2)))
    tensors = [torch.ones(3), torch.ones(3)]
    early = ranks[0].all_reduce(tensors[0])
    with pytest.raises(TimeoutError):
        early.wait(5)
    late = ranks[1].all_reduce(tensors[1])
    for work in (early, late):
        work.wait(DEADLINE_S)
    assert [tensor.tolist() for tensor in tensors] == [[2.0] * 3] * 2
    received, works = [torch.zeros(3), torch.zeros(3)], []
    for rank, comm in enumerate(ranks):
        with comm.group():
            with comm.group():
                works.append(comm.send(torch.full((3,), float(rank)), 1 - rank))
            works.append(comm.recv(received[rank], 1 - rank))
    for work in works:
        work.wait(DEADLINE_S)
    assert [tensor.tolist() for tensor in received] == [[1.0] * 3, [0.0] * 3]
    for comm in ranks:
        comm.abort("the test is over")


def test_split_and_shrink() -> None:
    on_ranks(lambda comm, _: cases.check_split(comm), 4)


def _refusals(comm: Communicator, _: Connection) -> list[str]:
    two = torch.ones(2, 2)
    half = torch.ones(2, dtype=torch.float16)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    sharded = DTensor.from_local(two, init_device_mesh("cpu", (2,)), [Shard(0)])
    wrong = [
        lambda: comm.all_reduce(two.t()),
        lambda: comm.all_reduce(two.to("meta")),
        lambda: comm.all_reduce(two, "median"),
        lambda: comm.all_reduce(two.to(torch.float8_e4m3fn)),
        lambda: comm.all_reduce(two.to(torch.int32), "avg"),
        lambda: comm.all_gather(torch.ones(3), torch.ones(2)),
        lambda: comm.all_gather(torch.ones(4), half),
        lambda: comm.broadcast(two, 2),
        lambda: comm.all_to_all_v(torch.ones(2), torch.ones(2), [1, 1], [3, -1]),
        lambda: comm.all_to_all(torch.ones(3), torch.ones(3)),
        lambda: comm.gather(two if comm.rank else None, two, 0),
        lambda: comm.split([[0, 1], [1]]),
        lambda: comm.all_reduce(torch.ones(2, dtype=torch.uint32)),
        lambda: comm.shrink([2]),
        lambda: comm.broadcast(torch.ones(2, dtype=torch.complex64).conj()),
        lambda: comm.all_gather(torch.ones(4), torch._neg_view(torch.ones(2))),
        lambda: comm.all_reduce(sharded),
        lambda: comm.recv(sharded, 1 - comm.rank),
        lambda: comm.all_reduce(two.to_sparse()),
        lambda: comm.all_reduce(None),
    ]
    texts = []
    for call in wrong:
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        texts.append(str(caught.value))
    comm.all_reduce(two).wait()  # the communicator is unharmed
    assert two.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    comm.close()
    comm.close()
    with pytest.raises(CommunicatorClosedError):
        comm.barrier()
    return texts


def test_wrong_arguments_are_refused_and_harm_nothing() -> None:
    texts = on_ranks(_refusals, 2)[0]
    for text, part in zip(
        texts[:5], ["not contiguous", "is on meta", "'median'", "float8_e4m3fn", "avg of"], strict=True
    ):
        assert part in text
    memory = [
        "resolve_conj",
        "resolve_neg",
        "use .to_local()",
        "use .to_local()",
        "not contiguous",
        "torch.Tensor is needed",
    ]
    for text, part in zip(texts[-6:], memory, strict=True):
        assert part in text


def _wrong_types(comm: Communicator, _: Connection) -> list[tuple[str, str]]:
    two = torch.ones(2)
    wrong: dict[str, Callable[[], Any]] = {
        "a tensor expected: all_reduce": lambda: comm.all_reduce(None),
        "a tensor expected: reduce": lambda: comm.reduce([1.0]),
        "a tensor expected: broadcast": lambda: comm.broadcast("x"),
        "a tensor expected: all_gather": lambda: comm.all_gather(None, two),
        "a tensor expected: all_gather source": lambda: comm.all_gather(two, None),
        "a tensor expected: reduce_scatter": lambda: comm.reduce_scatter(None, two),
        "a tensor expected: all_to_all": lambda: comm.all_to_all(None, None),
        "a tensor expected: all_to_all source": lambda: comm.all_to_all(two, None),
        "a tensor expected: gather": lambda: comm.gather(None, None),
        "a tensor expected: scatter": lambda: comm.scatter(None, two),
        "a tensor expected: send": lambda: comm.send(1.0, 1 - comm.rank),
        "a tensor expected: recv": lambda: comm.recv(None, 1 - comm.rank),
        "a rank: root of reduce": lambda: comm.reduce(two, "0"),
        "a rank: root of broadcast": lambda: comm.broadcast(two, None),
        "a rank: root of gather": lambda: comm.gather(None, two, 0.0),
        "a rank: root of scatter": lambda: comm.scatter(two, None, [0]),
        "a rank: peer of send": lambda: comm.send(two, None),
        "a rank: peer of recv": lambda: comm.recv(two, torch.tensor(0)),
        "reduction: a number": lambda: comm.all_reduce(two, 1),
        "reduction: None": lambda: comm.reduce(two, 0, None),
        "integers: None": lambda: comm.all_to_all_v(two, two, None, [1, 1]),
        "integers: floats": lambda: comm.all_to_all_v(two, two, [1, 1], [1.0, 1.0]),
        "numbers of at least 0: too few": lambda: comm.all_to_all_v(two, two, [], [1, 1]),
        "ranks: groups": lambda: comm.split(None),
        "ranks: groups of numbers": lambda: comm.split([0, 1]),
        "a rank: groups of texts": lambda: comm.split([["0", "1"]]),
        "ranks: leaving": lambda: comm.shrink(1),
        "a rank: leaving": lambda: comm.shrink(["1"]),
        "invitation: none": lambda: Communicator.join(None, 0, 1),
        "a ProcMesh: none": lambda: Communicator.create(None),
    }
    texts = []
    for what, call in wrong.items():
        try:
            call()
        except (TypeError, ValueError) as error:
            texts.append((what, str(error)))
    comm.all_reduce(two).wait()
    assert two.tolist() == [2.0, 2.0]
    assert len(texts) == len(wrong)
    return texts


def test_arguments_of_a_wrong_type_are_named() -> None:
    words = {
        "a tensor expected": "torch.Tensor is needed",
        "a rank": "a rank from 0 to 1 expected",
        "reduction": "one of sum, prod, max, min, avg expected",
        "integers": "a list of 2 integers expected",
        "numbers of at least 0": "2 numbers of at least 0 expected",
        "ranks": "ranks",
        "invitation": "invitation is a NoneType",
        "a ProcMesh": "a ProcMesh is expected",
    }
    for what, text in on_ranks(_wrong_types, 2)[0]:
        assert words[what.partition(":")[0]] in text, what


def _unlike_the_peers(comm: Communicator, _: Connection) -> list[str]:
    rank, size = comm.rank, comm.size
    odd = rank == 1  # this rank alone does another thing
    n = 4 if odd else 3
    dtype = torch.float64 if odd else torch.float32
    whole = torch.ones(size * n)
    calls: list[Callable[[], Any]] = [
        lambda: comm.all_reduce(torch.ones(n)),
        lambda: comm.all_reduce(torch.ones(3, dtype=dtype)),
        lambda: comm.all_reduce(torch.ones(3), "max" if odd else "sum"),
        lambda: comm.all_reduce(torch.ones(n), "avg"),
        lambda: comm.reduce(torch.ones(n), 0),
        lambda: comm.reduce(torch.ones(3), rank),
        lambda: comm.broadcast(torch.ones(n), 1),
        lambda: comm.broadcast(torch.ones(3), 1 if odd else 0),
        lambda: comm.all_gather(whole, torch.ones(n)),
        lambda: comm.reduce_scatter(torch.ones(n), whole),
        lambda: comm.all_to_all(whole, torch.ones(size * n)),
        lambda: comm.all_to_all_v(whole, torch.ones(size * n), [n] * size, [n] * size),
        lambda: comm.gather(torch.ones(size * n) if rank == 0 else None, torch.ones(n)),
        lambda: comm.scatter(torch.ones(n), torch.ones(size * n) if rank == 0 else None),
        lambda: comm.barrier() if odd else comm.all_reduce(torch.ones(3)),
        lambda: comm.all_gather(whole, torch.ones(n)) if odd else comm.broadcast(torch.ones(3)),
    ]
    texts = []
    for call in calls:
        with pytest.raises(CollectiveError) as caught:
            call().wait(DEADLINE_S)
        texts.append(str(caught.value))
        ones = torch.ones(2)
        comm.all_reduce(ones).wait(DEADLINE_S)  # the communicator is unharmed
        assert ones.tolist() == [size] * 2
    return texts


def test_ranks_that_do_not_do_the_same_are_named_and_nothing_is_harmed() -> None:
    every = on_ranks(_unlike_the_peers, 3)
    assert every[0] == every[1] == every[2]
    assert all("rank 1" in text or "to rank" in text for text in every[0])
    assert "rank 0 calls all_reduce of 3 elements of float32 (sum), rank 1 calls all_reduce of 4" in every[0][0]


def _unlike_the_sender(comm: Communicator, _: Connection) -> list[str]:
    peer, texts = 1 - comm.rank, []
    sent = torch.arange(1000.0)
    for received in (torch.zeros(10), torch.zeros(5000), torch.zeros(1000, dtype=torch.int32)):
        if comm.rank == 0:
            comm.send(sent, peer).wait(DEADLINE_S)
        else:
            with pytest.raises(CollectiveError) as caught:
                comm.recv(received, peer).wait(DEADLINE_S)
            texts.append(str(caught.value))
            assert not received.any()
        with comm.group():
            works = comm.send(sent, peer), comm.recv(received, peer)
        for work in works:
            with pytest.raises(CollectiveError, match="elements of float32 to rank"):
                work.wait(DEADLINE_S)
    exchanged = torch.zeros(1000)
    with comm.group():
        works = comm.recv(exchanged, peer), comm.send(sent, peer)
    for work in works:
        work.wait(DEADLINE_S)
    assert exchanged.tolist() == sent.tolist()
    return texts


def test_a_receiver_that_expects_another_size_is_told_and_nothing_is_harmed() -> None:
    texts = on_ranks(_unlike_the_sender, 2)[1]
    assert texts[0].startswith("rank 0 sends 1000 elements of float32 to rank 1, which expects 10 of float32")
    assert "expects 5000 of float32" in texts[1]
    assert "expects 1000 of int32" in texts[2]


def _wait_for_the_dead(comm: Communicator, pipe: Connection) -> list[Any]:
    comm.barrier().wait()
    pipe.send(("result", os.getpid()))
    if comm.rank == 1:
        signal.pause()
    works = [comm.recv(torch.ones(1), 1), comm.all_reduce(torch.ones(1))]

    def supervisor() -> None:
        kind, reason = pipe.recv()
        comm.abort(reason, kind)

    threading.Thread(target=supervisor, daemon=True).start()
    texts = []
    for work in works:
        with pytest.raises(PeerLostError) as caught:
            work.wait(DEADLINE_S)
        texts.append((caught.value.rank, caught.value.reason))
    with pytest.raises(PeerLostError):
        comm.barrier()
    comm.close()  # as of one that was closed, there is nothing to wait for
    return texts


def test_abort_tells_every_waiter_which_rank_although_the_peer_only_hangs() -> None:
    processes, pipes = start(_wait_for_the_dead, 3)
    pids = [answer(pipe) for pipe in pipes]
    for rank in (0, 2):
        pipes[rank].send((1, "killed by signal 9"))
    for rank in (0, 2):
        assert answer(pipes[rank]) == [(1, "killed by signal 9")] * 2
    os.kill(pids[1], signal.SIGKILL)
    for process in processes:
        process.join()


def _end_with_the_dead(comm: Communicator, pipe: Connection) -> list[str]:
    comm.barrier().wait()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with comm.group():
        works = [comm.recv(torch.ones(1), 1), comm.recv(torch.ones(1), 2 - comm.rank)]
    errors = []
    for work in works:
        with pytest.raises(CollectiveError) as caught:
            work.wait(DEADLINE_S)
        errors.append(str(caught.value))
    return errors


def test_the_works_of_a_group_end_when_a_peer_dies() -> None:
    processes, pipes = start(_end_with_the_dead, 3)
    for rank in (0, 2):
        assert "failed" in answer(pipes[rank])[0]
    for process in processes:
        process.join()


PROGRAM = """
import sys
from concurrent.futures import ThreadPoolExecutor
import torch
from monarch_slurm.collectives import CollectiveError, Communicator, invite

def pair():
    invitation, _ = invite("gloo")
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: Communicator.join(invitation, rank, 2, timeout_s=60), range(2)))

first, second = pair()
pending = first.all_reduce(torch.ones(1))
first.abort("no progress", 1)
try:
    second.recv(torch.ones(1), 0).wait(60)
except CollectiveError:
    print("the peer is told")
third, _ = pair()
pending = third.recv(torch.ones(1), 1)
sys.exit(3)
"""


def test_a_program_that_ends_with_operations_pending_ends_with_its_own_code() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout, done.stderr) == (3, "the peer is told\n", "")


def test_an_invitation_does_not_show_its_secret_nor_its_store() -> None:
    invitation, _ = invite("gloo")
    assert repr(invitation.token) not in repr(invitation)
    assert repr(invitation.store) not in repr(invitation)
