"""What `hardware.py` checks with actors: a killed rank, its replacement, TorchFT's replicas, buffers of GPU memory."""

from __future__ import annotations

import hashlib
import math
import os
import signal
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import monarch_slurm.actor
from monarch_slurm.actor import Actor, RestartPolicy, current_rank, current_size, endpoint, shutdown_context, this_host
from monarch_slurm.collectives import Communicator, PeerLostError
from monarch_slurm.config import configure
from monarch_slurm.rdma import RDMABuffer, recent_transfers

WAIT_S = 60
GIB = 2**30


class Rank(Actor):
    """One rank of a communicator, and of a process group of torch's."""

    def __init__(self, group: Any) -> None:
        self.group = group

    @endpoint
    def total(self) -> tuple[int, float]:
        comm = self.group.local()
        tensor = torch.ones(1 << 20, device=comm.device)
        comm.all_reduce(tensor).wait(WAIT_S)
        return comm.size, tensor[-1].item()

    @endpoint
    def wait_for_all(self) -> tuple[int | None, float]:
        """Return which rank was lost, and when (seconds of the monotonic clock) this one was told."""
        comm = self.group.local()
        tensor = torch.ones(1 << 20, device=comm.device)
        try:
            comm.all_reduce(tensor).wait(WAIT_S)
        except PeerLostError as error:
            return error.rank, time.monotonic()
        raise AssertionError("the operation of a lost rank ended well")

    @endpoint
    def distributed(self, store: str) -> None:
        import torch.distributed as dist

        import monarch_slurm.collectives.c10d  # noqa: F401

        rank, size = current_rank().rank, math.prod(current_size().values())
        dist.init_process_group("cpu:gloo,cuda:monarch", init_method=f"file://{store}", rank=rank, world_size=size)
        dist.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()

    @endpoint
    def wait_for_all_distributed(self) -> tuple[str, float]:
        """Return the error that an all_reduce ends with, at the latest the one after it, and when."""
        import torch.distributed as dist

        tensor = torch.ones(1 << 20, device="cuda")
        try:
            dist.all_reduce(tensor)
            torch.cuda.synchronize()
            told = time.monotonic()
            dist.all_reduce(tensor)
        except dist.DistBackendError as error:
            return str(error), told
        raise AssertionError("the operation of a lost rank ended well")

    @endpoint
    def pid(self) -> int:
        return os.getpid()


def _go_on() -> None:
    monarch_slurm.actor.unhandled_fault_hook = lambda failure: None


def _kill_the_last(ranks: Any, size: int, waits: str) -> tuple[list[Any], float]:
    """Kill the last rank while the others wait for it; return what they say, and when it was killed."""
    pid = ranks.slice(gpus=size - 1).pid.call_one().get()
    waiting = [getattr(ranks.slice(gpus=rank), waits).call_one() for rank in range(size - 1)]
    time.sleep(1)  # they wait inside of the operation by now; nothing tells when
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return [answer.get(timeout=WAIT_S) for answer in waiting], killed


def killed_rank(size: int, backend: str | None = None) -> str:
    """A rank that is killed in an all_reduce: the others are told, go on alone, then with its replacement."""
    _go_on()
    procs = this_host().spawn_procs({"gpus": size}, gpus_per_proc=None if backend else 1)
    group = Communicator.create(procs, backend=backend)
    ranks = procs.spawn("ranks", Rank, group)
    assert all(answer == (size, size) for _, answer in ranks.total.call().get())
    answers, killed = _kill_the_last(ranks, size, "wait_for_all")
    assert {rank for rank, _ in answers} == {size - 1}
    told = max(told for _, told in answers) - killed
    begin = time.monotonic()
    group.remake()
    totals = [ranks.slice(gpus=rank).total.call_one() for rank in range(size - 1)]
    assert all(answer.get(timeout=WAIT_S) == (size - 1, size - 1) for answer in totals)
    again = time.monotonic() - begin
    procs.stop().get()
    return f"told in {1e3 * told:.0f} ms, all_reduce among the survivors after {1e3 * again:.0f} ms more"


def replaced_rank(size: int, backend: str | None = None) -> str:
    """The same in procs that are started again in place: the communicator is made anew with the replacement."""
    _go_on()
    procs = this_host().spawn_procs(
        {"gpus": size}, gpus_per_proc=None if backend else 1, restart=RestartPolicy(max_restarts=1)
    )
    group = Communicator.create(procs, backend=backend)
    ranks = procs.spawn("ranks", Rank, group)
    ranks.total.call().get()
    _, killed = _kill_the_last(ranks, size, "wait_for_all")
    ranks.slice(gpus=size - 1).pid.call_one().get(timeout=WAIT_S)
    group.remake()
    assert all(answer == (size, size) for _, answer in ranks.total.call().get(timeout=WAIT_S))
    took = time.monotonic() - killed
    procs.stop().get()
    return f"all_reduce of all {size} ranks {took:.1f} s after the kill"


def killed_rank_distributed(size: int) -> str:
    """The same on the backend ``monarch`` of torch.distributed."""
    _go_on()
    store = str(Path(tempfile.mkdtemp()) / "store")
    procs = this_host().spawn_procs({"gpus": size}, gpus_per_proc=1)
    ranks = procs.spawn("ranks", Rank, None)
    ranks.distributed.call(store).get()
    answers, killed = _kill_the_last(ranks, size, "wait_for_all_distributed")
    assert all(f"rank {size - 1}" in text for text, _ in answers), answers
    told = max(told for _, told in answers) - killed
    procs.stop().get()
    return f"torch.distributed: the running all_reduce ended in {1e3 * told:.0f} ms, the next one names the rank"


class Replica(Actor):
    """One replica of a model, with one GPU, that TorchFT trains over `ProcessGroupMonarch`."""

    @endpoint
    def train(
        self, rank: int, lighthouse: str, folder: str, dies_after: int
    ) -> tuple[str, list[tuple[float, int]], float]:
        """Train until the step that the file ``end`` in ``folder`` names.

        Rank 1 is killed inside of a step after it has committed ``dies_after`` steps; if that is never (0), it writes
        the file: 20 steps after its own first.

        Returns:
            A digest of the parameters; when each step was committed (seconds of the monotonic clock) by how many
            replicas; and when the first one was given up.
        """
        import torchft
        from torch._C._distributed_c10d import TCPStore

        from monarch_slurm.collectives.torchft import ProcessGroupMonarch

        end = Path(folder) / "end"
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def load(state: Any) -> None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

        manager = torchft.Manager(
            pg=ProcessGroupMonarch(timedelta(seconds=WAIT_S)), load_state_dict=load,
            state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
            min_replica_size=1, use_async_quorum=False, init_sync=False, timeout=timedelta(seconds=WAIT_S),
            rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port, hostname="127.0.0.1",
            lighthouse_addr=lighthouse, replica_id=f"replica{rank}",
        )  # fmt: skip
        commits: list[tuple[float, int]] = []
        given_up = 0.0
        while not end.exists() or manager.current_step() < int(end.read_text()):
            manager.start_quorum()
            optimizer.zero_grad()
            generator = torch.Generator("cuda").manual_seed(100 * manager.current_step() + rank)
            model(torch.randn(32, 256, device="cuda", generator=generator)).square().mean().backward()
            if rank == 1 and 0 < dies_after == len(commits):
                (end.parent / "killed").write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            for parameter in model.parameters():
                manager.allreduce(parameter.grad).wait()
            if manager.should_commit():
                optimizer.step()
                commits.append((time.monotonic(), manager.num_participants()))
            else:
                given_up = given_up or time.monotonic()
            if dies_after == 0 and len(commits) == 1 and not end.exists():
                (end.parent / "new").write_text(str(manager.current_step() + 20))
                (end.parent / "new").rename(end)
        torch.cuda.synchronize()
        manager.shutdown(wait=False)
        bytes_of = b"".join(each.detach().cpu().numpy().tobytes() for each in model.parameters())
        return hashlib.sha256(bytes_of).hexdigest(), commits, given_up


def torchft_replicas(size: int) -> str:
    """A replica is killed in a step: the other goes on alone, then with the replacement, which gets the state of it."""
    os.environ.setdefault("RUST_LOG", "warn")
    from torchft.coordination import LighthouseServer

    _go_on()
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=10, heartbeat_timeout_ms=1000
    )
    address = f"http://127.0.0.1:{lighthouse.address().rsplit(':', 1)[1]}"
    folder = tempfile.mkdtemp()
    procs = this_host().spawn_procs({"gpus": 2}, gpus_per_proc=1, restart=RestartPolicy(max_restarts=1))
    replicas = procs.spawn("replicas", Replica)
    survivor, victim = (replicas.slice(gpus=rank).train for rank in range(2))
    lasting = survivor.call_one(0, address, folder, 5)
    error = victim.call_one(1, address, folder, 5).exception(timeout=WAIT_S)
    assert error is not None, "the replica was to be killed"
    killed = float((Path(folder) / "killed").read_text())
    state, later, _ = victim.call_one(1, address, folder, 0).get(timeout=WAIT_S)
    same, commits, given_up = lasting.get(timeout=WAIT_S)
    procs.stop().get()
    lighthouse.shutdown()
    assert state == same, "the states differ at the end"
    after = [(at - killed, participants) for at, participants in commits if at > killed]
    alone = sum(participants == 1 for _, participants in after)
    assert [participants for _, participants in after] == [1] * alone + [2] * 21, after
    assert [participants for _, participants in later] == [2] * 21, later
    first = after[0][0]
    return (
        f"TorchFT: step given up {1e3 * (given_up - killed):.0f} ms after the kill, next one committed alone after "
        f"{first:.2f} s, {alone} steps alone, then with the replacement; states equal"
    )


class Holder(Actor):
    """Owns GPU memory, or reads and writes that of another."""

    def __init__(self, device: int, expandable: bool) -> None:
        change = getattr(torch._C, "_accelerator_setAllocatorSettings", torch.cuda.memory._set_allocator_settings)
        change(f"expandable_segments:{expandable}")
        torch.cuda.set_device(device)
        self.kept: list[torch.Tensor] = []

    @endpoint
    def make(self, nbytes: int) -> RDMABuffer:
        self.kept.append(_pattern(nbytes, 1))
        torch.cuda.synchronize()
        return RDMABuffer(self.kept[-1])

    @endpoint
    def holds(self, index: int, seed: int) -> bool:
        return torch.equal(self.kept[index], _pattern(len(self.kept[index]), seed))

    @endpoint
    def exchange(self, buffer: RDMABuffer) -> str:
        """Read the buffer, then write another pattern to it; return by which backend."""
        target = torch.zeros(buffer.size(), dtype=torch.uint8, device="cuda")
        buffer.read_into(target).get()
        assert torch.equal(target, _pattern(len(target), 1)), "what was read differs"
        on_host = torch.zeros(buffer.size(), dtype=torch.uint8)
        buffer.read_into(on_host).get()
        assert torch.equal(on_host, target.cpu()), "what was read to the host differs"
        buffer.write_from(_pattern(len(target), 2)).get()
        return recent_transfers()[-1].backend


def _pattern(nbytes: int, seed: int) -> torch.Tensor:
    words = torch.arange((nbytes + 3) // 4, dtype=torch.int32, device="cuda") * (2 * seed + 1)
    return words.view(torch.uint8)[:nbytes].clone()


def buffers(size: int) -> str:
    """`RDMABuffer` of GPU memory read and written by another process, of plain and of expandable segments."""
    return _moved(size, "", "gpu_ipc")


def bounced_buffers(size: int) -> str:
    """The same where the GPUs do not reach one another: through page-locked memory of the hosts."""
    return _moved(size, "tcp,local", "tcp")


def _moved(size: int, transports: str, expected: str) -> str:
    def bootstrap() -> None:
        if transports:
            configure(rdma_transports=transports)

    told = []
    for expandable in (False, True):
        procs = this_host().spawn_procs({"gpus": 2}, bootstrap=bootstrap)
        owner = procs.slice(gpus=0).spawn("owner", Holder, 0, expandable)
        user = procs.slice(gpus=1).spawn("user", Holder, size - 1, expandable)
        sizes = [1, 4097, (64 << 20) + 3, GIB]
        for index, nbytes in enumerate(sizes):
            buffer = owner.make.call_one(nbytes).get()
            backend = user.exchange.call_one(buffer).get(timeout=WAIT_S)
            assert owner.holds.call_one(index, 2).get(), f"what was written differs ({nbytes} bytes)"
            told.append(backend)
        procs.stop().get()
    assert set(told) == {expected}, told
    return f"{len(sizes)} sizes to 1 GiB, plain and expandable segments, both ways bit for bit by {told[0]}"


def main(check: str, size: int, pipe: Any) -> None:
    """Run one check in a process of its own."""
    try:
        if size == 1 and not check.endswith("buffers"):
            text = "needs 2 GPUs"
        else:
            text = globals()[check](size)
            shutdown_context().get(30)
        pipe.send((True, text))
    except BaseException:
        pipe.send((False, traceback.format_exc(limit=-3)))
