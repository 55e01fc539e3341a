"""Collectives of CPU tensors between real processes."""

from __future__ import annotations

import multiprocessing
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
import torch.distributed as dist  # noqa: E402
from torch.distributed.tensor import DTensor, Shard, init_device_mesh  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from monarch_slurm.collectives import (  # noqa: E402
    CollectiveError,
    Communicator,
    CommunicatorClosedError,
    PeerLostError,
    invite,
)

DEADLINE_S = 60


def _rank_main(body: Callable[..., Any], invitation: Any, rank: int, size: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send(("result", body(Communicator.join(invitation, rank, size, timeout_s=DEADLINE_S), pipe)))
    except BaseException as error:
        pipe.send(("error", f"rank {rank}: {type(error).__name__}: {error}"))
    os._exit(0)


def start(body: Callable[..., Any], size: int) -> tuple[list[Any], list[Connection], Any]:
    invitation, kept = invite("gloo")
    context = multiprocessing.get_context("fork")
    processes, pipes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_rank_main, args=(body, invitation, rank, size, theirs), daemon=True))
        pipes.append(ours)
        processes[-1].start()
    return processes, pipes, kept


def answer(pipe: Connection) -> Any:
    assert pipe.poll(DEADLINE_S), "a rank did not answer"
    kind, value = pipe.recv()
    assert kind == "result", value
    return value


def on_ranks(body: Callable[..., Any], size: int) -> list[Any]:
    processes, pipes, _kept = start(body, size)
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
    invitation, kept = invite("gloo")
    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(lambda rank: Communicator.join(invitation, rank, 2, timeout_s=4), range(2)))
    del kept
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
    processes, pipes, _kept = start(_wait_for_the_dead, 3)
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
    processes, pipes, _kept = start(_end_with_the_dead, 3)
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
    invitation, kept = invite("gloo")
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: Communicator.join(invitation, rank, 2, timeout_s=60), range(2))), kept

(first, second), kept = pair()
pending = first.all_reduce(torch.ones(1))
first.abort("no progress", 1)
try:
    second.recv(torch.ones(1), 0).wait(60)
except CollectiveError:
    print("the peer is told")
(third, _), other = pair()
pending = third.recv(torch.ones(1), 1)
sys.exit(3)
"""


def test_a_program_that_ends_with_operations_pending_ends_with_its_own_code() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout, done.stderr) == (3, "the peer is told\n", "")


def test_an_invitation_does_not_show_its_token() -> None:
    invitation, _kept = invite("gloo")
    assert invitation.token.decode() not in repr(invitation)
