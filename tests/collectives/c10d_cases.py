"""The c10d backend on the device ``fakegpu`` and a fake NCCL: each rank is a thread with a device of its own.

Run by `test_c10d` and, under the sanitizers, by `tests/native/test_sanitizers.py`: in a process of its own, since the
device cannot be taken away again.
"""

from __future__ import annotations

import copy
import datetime
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import cases
import fake_device
import pytest
import torch
import torch.distributed as dist
from fake_libraries import compile_fake, compile_fake_device
from support import DEADLINE, wait_until

from monarch_slurm.collectives import c10d
from monarch_slurm.native_build import load_native

SIZE = 3
REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "avg": dist.ReduceOp.AVG,
}


@pytest.fixture(scope="module", autouse=True)
def _device(tmp_path_factory: pytest.TempPathFactory) -> None:
    for module in ("_native", "_c10d"):
        load_native(module)  # compiled now, not while ranks wait for each other
    fake_device.load(compile_fake_device())
    os.environ["MONARCH_SLURM_CCL_LIBRARY"] = str(compile_fake("fake_ccl", "cuda", tmp_path_factory.mktemp("fake")))


class Rank:
    """A rank's process group, with the operations that `cases` checks under their names."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        fake_device.set_device(rank)
        self.rank, self.size, self.device = rank, size, torch.device(fake_device.NAME, rank)
        self.backend = c10d._create(store, rank, size, datetime.timedelta(seconds=DEADLINE), fake_device.NAME)
        self.pg = dist.ProcessGroup(store, rank, size)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self.pg._register_backend(self.device, kind, self.backend)
        self.pg._set_default_backend(kind)
        self.stream = next(stream for stream in reversed(c10d._streams) if stream.device_index == rank)
        self.stream_id = self.stream.stream_id
        self.transport = next(each for each, _ in reversed(c10d._groups) if each.rank == rank and each.size == size)

    def another(self, timeout_s: float) -> Any:
        """Return a backend on the same communicator and stream."""
        ours = (self.transport.comm.capsule(), self.stream, self.stream.cuda_stream)
        return load_native("_c10d").create(self.rank, self.size, *ours, timeout_s)

    def tensor(self, *values: float) -> torch.Tensor:
        return torch.tensor(values, device=self.device)

    @contextmanager
    def held(self, stream_id: int = 0) -> Iterator[None]:
        with fake_device.held(self.rank, stream_id):
            yield

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> Any:
        options = dist.AllreduceOptions()
        options.reduceOp = REDUCTIONS[op]
        return self.pg.allreduce([tensor], options)

    def reduce(self, tensor: torch.Tensor, root: int, op: str = "sum") -> Any:
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = REDUCTIONS[op], root
        return self.pg.reduce([tensor], options)

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, op: str = "sum") -> Any:
        options = dist.ReduceScatterOptions()
        options.reduceOp = REDUCTIONS[op]
        return self.pg._reduce_scatter_base(output, source, options)

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Any:
        return self.pg._allgather_base(output, source)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self.pg.broadcast([tensor], options)

    def all_to_all(self, output: torch.Tensor, source: torch.Tensor) -> Any:
        return self.pg.alltoall_base(output, source, [], [])

    def all_to_all_v(
        self, output: torch.Tensor, source: torch.Tensor, output_counts: list[int], input_counts: list[int]
    ) -> Any:
        return self.pg.alltoall_base(output, source, output_counts, input_counts)

    def parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return list(whole.view(self.size, whole.numel() // self.size).unbind())

    def gather(self, whole: torch.Tensor | None, source: torch.Tensor, root: int) -> Any:
        options = dist.GatherOptions()
        options.rootRank = root
        return self.pg.gather([] if whole is None else [self.parts(whole)], [source], options)

    def scatter(self, output: torch.Tensor, whole: torch.Tensor | None, root: int) -> Any:
        options = dist.ScatterOptions()
        options.rootRank = root
        return self.pg.scatter([output], [] if whole is None else [self.parts(whole)], options)

    def send(self, tensor: torch.Tensor, peer: int) -> Any:
        return self.pg.send([tensor], peer, 0)

    def recv(self, tensor: torch.Tensor, peer: int) -> Any:
        return self.pg.recv([tensor], peer, 0)

    def barrier(self) -> Any:
        return self.backend.barrier()

    def start_group(self) -> None:
        self.pg._start_coalescing(self.device)

    def end_group(self) -> Any:
        return self.pg._end_coalescing(self.device)

    @contextmanager
    def group(self) -> Iterator[None]:
        self.start_group()
        yield
        self.end_group()


def on_ranks(body: Callable[[Rank], Any], size: int = SIZE) -> list[Any]:
    """Run ``body`` on every rank of a new group."""
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=DEADLINE))
    made: list[Rank] = []

    def run(rank: int) -> Any:
        made.append(Rank(store, rank, size))
        return body(made[-1])

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        done, late = wait(futures, DEADLINE, return_when=FIRST_EXCEPTION)
        for rank in made:  # else the others would wait for one that has failed
            rank.backend.abort()
        for future in done:
            future.result()
        assert not late
        return [future.result() for future in futures]


def same(got: torch.Tensor, want: Sequence[float] | torch.Tensor) -> None:
    cases.expect("", got, torch.as_tensor(want))


def test_reductions_of_every_dtype() -> None:
    assert on_ranks(partial(cases.check_reductions, dtypes=[*cases.DTYPES, *cases.FLOAT8])) == [690] * SIZE


def test_moves_of_every_dtype() -> None:
    assert len(set(on_ranks(cases.check_moves))) == 1


def _lists(rank: Rank) -> None:
    """Operations on lists, of equal and unequal sizes."""
    for sizes in ([2, 2, 2], [1, 3, 0]):
        mine = torch.full((sizes[rank.rank],), float(rank.rank), device=rank.device)
        gathered = [torch.empty(each, device=rank.device) for each in sizes]
        rank.pg.allgather([gathered], [mine]).wait()
        for peer, part in enumerate(gathered):
            same(part, [float(peer)] * sizes[peer])
        inputs = [torch.full((each,), rank.rank + 10.0 * peer, device=rank.device) for peer, each in enumerate(sizes)]
        output = torch.empty_like(inputs[rank.rank])
        rank.pg.reduce_scatter([output], [inputs]).wait()
        same(output, [3.0 + 30.0 * rank.rank] * sizes[rank.rank])
    inputs = [rank.tensor(*[rank.rank * 10.0 + peer] * (peer + 1)) for peer in range(SIZE)]
    outputs = [torch.empty(rank.rank + 1, device=rank.device) for _ in range(SIZE)]
    rank.pg.alltoall(outputs, inputs).wait()
    for peer, part in enumerate(outputs):
        same(part, [peer * 10.0 + rank.rank] * (rank.rank + 1))


def test_lists_of_tensors() -> None:
    on_ranks(_lists)


def _many(rank: Rank) -> None:
    """Several tensors in one call, of different dtypes."""
    one, two = rank.tensor(1.0, 2.0), torch.tensor([rank.rank], device=rank.device)
    rank.pg.allreduce_coalesced([one, two]).wait()
    same(one, [3.0, 6.0])
    same(two, [3])
    wholes = [torch.empty(SIZE, device=rank.device), torch.empty(2 * SIZE, dtype=torch.int64, device=rank.device)]
    parts = [rank.tensor(float(rank.rank)), torch.tensor([rank.rank, 7], device=rank.device)]
    rank.pg.allgather_into_tensor_coalesced(wholes, parts).wait()
    same(wholes[0], [0.0, 1.0, 2.0])
    same(wholes[1], [0, 7, 1, 7, 2, 7])
    rank.pg.reduce_scatter_tensor_coalesced(parts, wholes).wait()
    same(parts[0], [3.0 * rank.rank])
    same(parts[1], [3 * rank.rank, 21])


def test_many_tensors_in_one_call() -> None:
    on_ranks(_many)


def _special(rank: Rank) -> None:
    flags = torch.tensor([rank.rank == 0, False, True], device=rank.device)
    for op, want in {"sum": [1, 0, 1], "max": [1, 0, 1], "prod": [0, 0, 1], "min": [0, 0, 1]}.items():
        tensor = flags.clone()
        rank.all_reduce(tensor, op).wait()
        same(tensor, want)
    numbers = torch.tensor([1 + 2j, 3j], device=rank.device)
    rank.all_reduce(numbers).wait()
    assert numbers.tolist() == [3 + 6j, 9j]
    image = torch.ones(1, 2, 3, 4, device=rank.device).to(memory_format=torch.channels_last)
    rank.all_reduce(image).wait()
    same(image, torch.full((1, 2, 3, 4), 3.0))


def _factors(rank: Rank) -> None:
    """Each rank has a factor of its own, a number or a tensor that may be dropped."""
    options = dist.AllreduceOptions()
    for on_device in (False, True):
        tensor = rank.tensor(1.0, 2.0)
        with rank.held(rank.stream_id):
            factor = rank.tensor(rank.rank + 1.0) if on_device else rank.rank + 1.0
            options.reduceOp = dist._make_nccl_premul_sum(factor)
            work = rank.pg.allreduce([tensor], options)
            del factor
            options.reduceOp = dist.ReduceOp.SUM
        work.wait()
        same(tensor, [6.0, 12.0])
    for wrong in (torch.ones(1, dtype=torch.float64), torch.ones(1, device=f"{fake_device.NAME}:7")):
        options.reduceOp = dist._make_nccl_premul_sum(wrong)
        with pytest.raises(ValueError, match="the factor of PREMUL_SUM is"):
            rank.pg.allreduce([rank.tensor(1.0)], options)
    options.reduceOp = dist._make_nccl_premul_sum(2.0)
    with pytest.raises(ValueError, match="a float dtype expected"):
        rank.pg.allreduce([torch.ones(1, dtype=torch.int32, device=rank.device)], options)


def test_sums_of_multiples() -> None:
    on_ranks(_factors)


def test_booleans_complex_numbers_and_channels_last() -> None:
    on_ranks(_special)


def _order(rank: Rank) -> None:
    tensor = torch.zeros(4, device=rank.device)
    with rank.held():
        tensor.fill_(rank.rank + 1.0)
        work = rank.all_reduce(tensor)
        assert not work.is_completed()
    work.wait()
    same(tensor, [6.0] * 4)
    with rank.held(rank.stream_id):
        work = rank.all_reduce(tensor)
        work.wait()
        later = tensor.clone()
        read = torch.Event(rank.device)
        read.record()
        assert not work.is_completed()
        assert not read.query()
    same(later, [18.0] * 4)
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is tensor or torch.equal(work.result()[0].cpu(), tensor.cpu())


def test_both_streams_wait_for_each_other() -> None:
    on_ranks(_order)


def _memory(rank: Rank) -> None:
    """What is given to an operation may be dropped at once."""
    right, left = (rank.rank + 1) % SIZE, (rank.rank - 1) % SIZE
    outputs = [torch.empty(5, device=rank.device) for _ in range(4 + SIZE)]
    with rank.held(rank.stream_id):
        rank.start_group()
        rank.send(torch.full((5,), float(rank.rank), device=rank.device), right)
        rank.recv(outputs[0], left)
        rank.end_group()
        rank.pg.allgather([outputs[4:]], [torch.full((5,), float(rank.rank), device=rank.device)])
        rank.pg.reduce_scatter([outputs[1]], [[torch.full((5,), float(each), device=rank.device) for each in range(3)]])
        rank.start_group()
        rank.pg.reduce_scatter([outputs[2]], [[torch.full((5,), float(each), device=rank.device) for each in range(3)]])
        work = rank.pg.reduce_scatter(
            [outputs[3]], [[torch.full((5,), 2.0 * each, device=rank.device) for each in range(3)]]
        )
        rank.end_group()
    work.wait()
    want = [left, 3 * rank.rank, 3 * rank.rank, 6 * rank.rank, *range(SIZE)]
    for got, value in zip(outputs, want, strict=True):
        same(got, [float(value)] * 5)


def test_memory_is_kept_until_the_operation_is_through() -> None:
    on_ranks(_memory)


def _future(rank: Rank) -> None:
    tensor, target = torch.zeros(2, device=rank.device), torch.zeros(2, device=rank.device)
    with rank.held():
        tensor.fill_(1.0)
        future = rank.all_reduce(tensor).get_future()
        copied = future.then(lambda done: target.copy_(done.value()[0]))
    copied.wait()
    same(target, [3.0, 3.0])


def test_futures() -> None:
    on_ranks(_future)


def _blocks(rank: Rank) -> None:
    """Operations of one block start together; each one's work is good once the block has ended."""
    summed, mine = rank.tensor(1.0), rank.tensor(float(rank.rank))
    lists = [[torch.empty(1, device=rank.device) for _ in range(SIZE)] for _ in range(2)]
    received, to_self = torch.empty(1, device=rank.device), torch.empty(1, device=rank.device)
    with rank.held():
        summed.fill_(2.0)
        rank.start_group()
        works = [
            rank.recv(received, (rank.rank - 1) % SIZE),
            rank.all_reduce(summed),
            rank.pg.allgather([lists[0]], [mine]),
            rank.pg.allgather([lists[1]], [mine]),
            rank.send(mine, (rank.rank + 1) % SIZE),
            rank.recv(to_self, rank.rank),
            rank.send(mine, rank.rank),
        ]
        assert not any(work.is_completed() for work in works)
        whole = rank.end_group()
        assert not any(work.is_completed() for work in [*works, whole])
    for work in works:
        work.wait()
    same(summed, [6.0])
    for each in lists:
        same(torch.cat(each), [0.0, 1.0, 2.0])
    same(received, [float((rank.rank - 1) % SIZE)])
    same(to_self, [float(rank.rank)])
    whole.wait()
    wait_until(whole.is_completed)


def test_coalescing() -> None:
    on_ranks(_blocks)


def _sum_is_right(rank: Rank) -> None:
    tensor = rank.tensor(1.0)
    rank.all_reduce(tensor).wait()
    same(tensor, [3.0])


def _broken_blocks(rank: Rank) -> None:
    rank.start_group()
    collected = rank.all_reduce(rank.tensor(1.0))
    with pytest.raises(ValueError, match="there is no rank 9"):
        rank.send(rank.tensor(1.0), 9)
    with pytest.raises(RuntimeError, match="no coalescing block is open"):
        rank.end_group()
    with pytest.raises(dist.DistBackendError, match="given up with its coalescing block"):
        collected.wait()
    assert collected.is_completed()
    assert not collected.is_success()
    _sum_is_right(rank)
    rank.start_group()  # as when the caller's own exception leaves a block
    with pytest.raises(dist.DistBackendError, match="starts when its coalescing block ends"):
        rank.all_reduce(rank.tensor(1.0)).wait()
    _sum_is_right(rank)
    rank.start_group()
    forgotten = rank.all_reduce(rank.tensor(1.0))
    with rank.group():
        tensor = rank.tensor(1.0)
        work = rank.all_reduce(tensor)
    work.wait()
    with pytest.raises(dist.DistBackendError, match="given up"):
        forgotten.wait()
    same(tensor, [3.0])
    _sum_is_right(rank)


def test_a_block_that_does_not_end_harms_nothing() -> None:
    on_ranks(_broken_blocks)


def _refusals(rank: Rank) -> None:
    pg, one = rank.pg, rank.tensor(1.0, 2.0)
    flat = torch.empty(2 * SIZE, device=rank.device)
    whole, each = torch.empty(2, dtype=torch.int32, device=rank.device), [one.clone() for _ in range(SIZE)]
    strided, elsewhere = flat[::2], torch.zeros(2, device=f"{fake_device.NAME}:7")
    flags = torch.ones(2, dtype=torch.bool, device=rank.device)
    complex_one, short = torch.ones(1, dtype=torch.complex64, device=rank.device), torch.ones(2, device=rank.device)
    here, away = rank.rank, (rank.rank + 1) % SIZE

    def bands() -> Any:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.BAND
        return pg.allreduce([whole], options)

    def gather(outputs: list[list[torch.Tensor]], source: torch.Tensor, root: int) -> Any:
        options = dist.GatherOptions()
        options.rootRank = root
        return pg.gather(outputs, [source], options)

    def scatter(output: torch.Tensor, inputs: list[list[torch.Tensor]], root: int) -> Any:
        options = dist.ScatterOptions()
        options.rootRank = root
        return pg.scatter([output], inputs, options)

    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "is on fakegpu:7, the group on", lambda: rank.all_reduce(elsewhere)),
        (ValueError, "not contiguous", lambda: rank.all_reduce(strided)),
        (ValueError, "not contiguous", lambda: rank.send(strided, away)),
        (ValueError, "one tensor expected, not 2", lambda: pg.allreduce([one, one])),
        (TypeError, "cannot reduce Short", lambda: rank.all_reduce(one.to(torch.int16))),
        (TypeError, "cannot reduce booleans by AVG", lambda: rank.all_reduce(flags, "avg")),
        (TypeError, "by SUM and AVG only", lambda: rank.all_reduce(complex_one, "max")),
        (ValueError, "SUM, PRODUCT, MAX, MIN, AVG and PREMUL_SUM only", bands),
        (TypeError, "cannot reduce Short", lambda: pg.allreduce_coalesced([one, one.to(torch.int16)])),
        (ValueError, "there is no rank 3 in a group of 3", lambda: rank.broadcast(one, 3)),
        (ValueError, "there is no rank -1", lambda: rank.reduce(one, -1)),
        (ValueError, "there is no rank 3", lambda: rank.send(one, 3)),
        (ValueError, "this rank itself", lambda: rank.recv(one, here)),
        (TypeError, "the output is Int, the input Float", lambda: rank.all_gather(whole, one)),
        (ValueError, "2 elements is not 3 times", lambda: rank.all_gather(one, one)),
        (ValueError, "not contiguous", lambda: rank.all_gather(flat, strided[:2])),
        (ValueError, "as many outputs as inputs", lambda: pg.allgather_into_tensor_coalesced([flat, flat], [one])),
        (ValueError, "3 tensors expected, one for each rank, not 2", lambda: pg.allgather([each[:2]], [one])),
        (ValueError, "the other side's 1", lambda: pg.allgather([each], [one[:1]])),
        (TypeError, "the output is Float, the input Int", lambda: pg.allgather([each], [whole])),
        (ValueError, "2 elements is not 3 times", lambda: rank.reduce_scatter(one, one)),
        (TypeError, "the output is Int", lambda: rank.reduce_scatter(whole, flat)),
        (ValueError, "not 2", lambda: pg.reduce_scatter([one], [each[:2]])),
        (TypeError, "the output is Int", lambda: pg.reduce_scatter([whole], [each])),
        (ValueError, "as many outputs as inputs", lambda: pg.reduce_scatter_tensor_coalesced([one], [flat, flat])),
        (ValueError, "does not divide by 3", lambda: rank.all_to_all(one, one)),
        (ValueError, "3 split sizes expected, not 2", lambda: rank.all_to_all_v(flat, flat, [3, 3], [2, 2, 2])),
        (ValueError, "2 2 1 do not fill", lambda: rank.all_to_all_v(flat, flat, [2, 2, 2], [2, 2, 1])),
        (ValueError, "do not fit", lambda: rank.all_to_all_v(flat, flat, [2, 2, 2], [2, 2, 3])),
        (ValueError, "do not fit", lambda: rank.all_to_all_v(flat, flat, [-2, 2, 6], [2, 2, 2])),
        (ValueError, "without dimensions", lambda: rank.all_to_all(flat[0], flat[0])),
        (TypeError, "the output is Float, the input Double", lambda: rank.all_to_all(flat, flat.double())),
        (ValueError, "3 tensors expected", lambda: pg.alltoall(each[:2], each)),
        (ValueError, "3 tensors expected", lambda: pg.alltoall(each, each[:2])),
        (ValueError, "2 elements, the other side's 1", lambda: pg.alltoall(each, [part[:1] for part in each])),
        (ValueError, "not 2", lambda: gather([each[:2]], one, here)),
        (ValueError, "only the root", lambda: gather([each], one, away)),
        (ValueError, "one list of tensors expected, not 0", lambda: gather([], one, here)),
        (TypeError, "Float", lambda: gather([each], whole, here)),
        (ValueError, "there is no rank 5", lambda: gather([each], one, 5)),
        (ValueError, "not 2", lambda: scatter(one, [each[:2]], here)),
        (ValueError, "only the root", lambda: scatter(one, [each], away)),
        (ValueError, "the other side's 1", lambda: scatter(short[:1], [each], here)),
    ]
    for error, text, call in refused:
        with pytest.raises(error, match=text):
            call()
    _sum_is_right(rank)


def test_what_cannot_be_right_is_refused() -> None:
    on_ranks(_refusals)


def test_an_abort_ends_what_waits() -> None:
    def body(rank: Rank) -> None:
        if rank.rank != 0:
            return  # never calls
        tensor = rank.tensor(1.0)
        work = rank.all_reduce(tensor)
        with pytest.raises(dist.DistBackendError, match="ALLREDUCE is not through after 10 ms; another rank"):
            work.wait(datetime.timedelta(milliseconds=10))
        assert not work.is_completed()
        ending = threading.Timer(0.05, rank.backend.abort)
        ending.start()
        with pytest.raises(dist.DistBackendError, match="the process group was aborted"):
            work.wait(datetime.timedelta(seconds=DEADLINE))
        ending.join()
        assert work.is_completed()
        assert not work.is_success()
        assert "the process group was aborted" in str(work.exception())
        with pytest.raises(dist.DistBackendError, match="the process group was aborted"):
            rank.all_reduce(tensor)
        with pytest.raises(dist.DistBackendError, match="the process group was aborted"):
            rank.all_to_all(rank.tensor(1.0, 2.0, 3.0), rank.tensor(1.0, 2.0, 3.0))
        assert tensor.cpu().numel() == 1  # the streams go on

    on_ranks(body)


def test_an_abort_while_operations_are_started() -> None:
    def body(rank: Rank) -> None:
        tensor = rank.tensor(1.0)
        ending = threading.Thread(target=rank.backend.abort)
        with pytest.raises(dist.DistBackendError, match="aborted"):  # noqa: PT012 - one of many
            for step in range(100_000):
                if step == 20:
                    ending.start()
                with rank.group():
                    rank.all_reduce(tensor)
                    rank.all_reduce(tensor)
        ending.join()

    on_ranks(body)


def test_an_operation_that_does_not_end_in_time_ends_the_group() -> None:
    def body(rank: Rank) -> None:
        for _ in range(3):
            _sum_is_right(rank)
        wait_until(lambda: not rank.transport.overdue())
        rank.backend.set_timeout(datetime.timedelta(milliseconds=300))
        if rank.rank != 0:
            return  # never calls
        work = rank.all_reduce(rank.tensor(1.0))
        with pytest.raises(
            dist.DistBackendError,
            match="rank 0 of 3: ALLREDUCE, operation 4 of the group, is not through after 300 ms",
        ):
            work.wait(datetime.timedelta(seconds=DEADLINE))
        with pytest.raises(dist.DistBackendError, match="operation 4 of the group"):
            rank.all_reduce(rank.tensor(1.0))
        assert not rank.transport.overdue()

    on_ranks(body)


def test_the_control_plane_names_the_lost_rank() -> None:
    def body(rank: Rank) -> None:
        work = rank.all_reduce(rank.tensor(1.0)) if rank.rank == 0 else None
        if work is not None:
            rank.transport.abort(c10d.PeerLostError("killed by signal 9", 1))
            wait_until(work.is_completed)
            with pytest.raises(dist.DistBackendError, match=r"rank 1 .*killed by signal 9"):
                work.wait()

    on_ranks(body, 2)


def test_a_barrier_holds_the_host_until_all_have_come() -> None:
    arrived = threading.Event()

    def body(rank: Rank) -> None:
        if rank.rank == 0:
            waiting = threading.Thread(target=lambda: wait_until(lambda: wait_started.is_set()) and arrived.set())
            waiting.start()
            wait_started.set()
            waiting.join()
        rank.barrier().wait()
        assert arrived.is_set()

    wait_started = threading.Event()
    on_ranks(body)


def test_a_barrier_that_not_all_come_to_ends() -> None:
    def body(rank: Rank) -> None:
        if rank.rank == 0:
            options = dist.BarrierOptions()
            options.timeout = datetime.timedelta(milliseconds=200)
            with pytest.raises(dist.DistBackendError, match="BARRIER is not through after 200 ms"):
                rank.backend.barrier(options).wait()

    on_ranks(body)


def test_the_end_of_a_group_waits_for_what_was_started() -> None:
    def body(rank: Rank) -> None:
        tensor = rank.tensor(1.0)
        with ThreadPoolExecutor(1) as pool:
            with rank.held(rank.stream_id):
                work = rank.all_reduce(tensor)
                work.wait()
                ending = pool.submit(rank.backend.shutdown)
            ending.result(DEADLINE)
        same(tensor, [3.0])
        work.wait()
        assert work.is_success()
        with pytest.raises(dist.DistBackendError, match="was closed"):
            rank.all_reduce(tensor)

    on_ranks(body)


def test_the_end_of_a_group_does_not_wait_for_ever() -> None:
    def body(rank: Rank) -> None:
        if rank.rank == 0:
            work = rank.all_reduce(rank.tensor(1.0))
            rank.another(timeout_s=0.2).shutdown()
            with pytest.raises(dist.DistBackendError, match="destroyed while its operations waited"):
                work.wait()

    on_ranks(body)


def test_what_is_no_communicator_is_refused() -> None:
    def body(rank: Rank) -> None:
        create, capsule = load_native("_c10d").create, rank.transport.comm.capsule()
        with pytest.raises(ValueError, match="has another rank or size"):
            create(0, 2, capsule, rank.stream, rank.stream.cuda_stream, 1.0)
        with pytest.raises(ValueError, match="not a communicator"):
            create(0, 1, datetime.datetime_CAPI, rank.stream, rank.stream.cuda_stream, 1.0)

    on_ranks(body, 1)


def test_torch_distributed_trains_and_ends() -> None:
    device = torch.device(fake_device.NAME, 0)
    fake_device.set_device(device)
    create = partial(c10d._create, device_type=fake_device.NAME)
    dist.Backend.register_backend("monarch_here", create, devices=[fake_device.NAME])
    dist.init_process_group(f"{fake_device.NAME}:monarch_here", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    plain = torch.nn.Linear(3, 2).to(device)
    wrapped = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(plain), device_ids=[0])
    inputs = torch.ones(4, 3, device=device)
    for model in (plain, wrapped):
        model(inputs).square().mean().backward()
    same(wrapped.module.weight.grad, plain.weight.grad.cpu())
    tensor, received = torch.ones(3, device=device), torch.zeros(3, device=device)
    exchange = [dist.P2POp(dist.irecv, received, 0), dist.P2POp(dist.isend, tensor, 0)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    same(received, [1.0] * 3)
    group = dist.new_group([0])
    with dist._coalescing_manager(group, device):
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(received, group=group)
    dist.barrier(group)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    dist.destroy_process_group()
    same(tensor, [1.0] * 3)
