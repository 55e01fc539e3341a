"""Everything that needs GPUs, once: memory, collectives, abort, re-making, the c10d backend. Prints one table.

    python bench/gpu/hardware.py            # uses every GPU that is visible, one process each
    python bench/gpu/hardware.py --json F   # also writes the rows to F

The package must be installed, or the repository's root be on PYTHONPATH. No network is used; the native module is
built first if need be. Rows that fail say why, and
the exit status is their number.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from monarch_slurm.collectives import Communicator, PeerLostError, invite
from monarch_slurm.gpu import (
    GpuMemory,
    export_dmabuf,
    gpu_devices,
    receive_memory,
    receive_tensor,
    send_memory,
    send_tensor,
)
from monarch_slurm.native_build import build_native, gpu_platform

DEADLINE_S = 120
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "collectives"))  # `cases`: what CI checks on CPUs
Pipe = Any


def facts(_rank: int, _size: int, _pipe: Pipe) -> str:
    return ", ".join(f"{device.name} at {device.pci_address}, NUMA {device.numa_node}" for device in gpu_devices())


def memory(rank: int, _size: int, pipe: Pipe) -> str:
    """A mapping of rank 0 written by rank 1, as bytes and as a tensor; a dmabuf of it and of torch's memory."""
    sock = socket.socket(fileno=pipe[2])
    if rank == 1:
        mapped = receive_memory(sock, rank)
        mapped.tensor()[100:104] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8, device=f"cuda:{rank}")
        torch.cuda.synchronize()
        sock.sendall(b"!")
        peer = receive_tensor(sock, rank)
        peer += 1
        torch.cuda.synchronize()
        sock.sendall(b"!")
        return "written from the peer"
    mapped = GpuMemory.allocate(1 << 20)
    made = export_dmabuf(mapped.address + 5, 1000)
    os.close(made.fd)
    tensor = torch.arange(1000, device="cuda:0").to(torch.float32)
    plain = export_dmabuf(tensor.data_ptr(), 4000)
    os.close(plain.fd)
    if _size == 1:
        return f"{mapped.size_bytes} bytes mapped; dmabuf of mapped and of torch's memory"
    send_memory(sock, mapped)
    assert sock.recv(1) == b"!"
    assert mapped.read(4, 100) == b"\1\2\3\4"
    send_tensor(sock, tensor)
    assert sock.recv(1) == b"!"
    assert torch.equal(tensor.cpu(), torch.arange(1000).float() + 1)
    return f"{mapped.size_bytes} bytes mapped in both; torch tensor shared; dmabuf of both (offset {made.offset_bytes})"


def join(rank: int, size: int, pipe: Pipe) -> Communicator:
    """Join by an invitation that rank 0 makes and the parent process carries."""
    if rank == 0:
        pipe[0].send(("invitation", invite("ccl")[0]))
    return Communicator.join(pipe[0].recv(), rank, size, device=f"cuda:{rank}", timeout_s=DEADLINE_S)


def reductions(rank: int, size: int, pipe: Pipe) -> str:
    cases = import_module("cases")
    comm = join(rank, size, pipe)
    text = f"{cases.check_reductions(comm)} equal the float64 reference"
    text += f", {cases.check_rough_values(comm)} within their rounding, {cases.check_unsigned(comm)} unsigned"
    comm.close()
    return text


def float8(rank: int, size: int, pipe: Pipe) -> str:
    cases = import_module("cases")
    comm = join(rank, size, pipe)
    text = f"{cases.check_reductions(comm, cases.FLOAT8)} within the rounding of float8"
    comm.close()
    return text


def moves(rank: int, size: int, pipe: Pipe) -> str:
    cases = import_module("cases")
    comm = join(rank, size, pipe)
    text = f"{cases.check_moves(comm)} bit for bit"
    if size > 1:
        cases.check_split(comm)
        text += ", split and shrink"
    comm.close()
    return text


def graph(rank: int, size: int, pipe: Pipe) -> str:
    comm = join(rank, size, pipe)
    tensor = torch.ones(1 << 20, device=comm.device)
    comm.all_reduce(tensor).wait()
    tensor.fill_(1)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        tensor.mul_(2)
        comm.all_reduce(tensor)
    for _ in range(3):
        captured.replay()
    torch.cuda.synchronize()
    assert torch.unique(tensor).tolist() == [float((2 * size) ** 3)]
    del captured
    comm.close()
    return "all_reduce replayed 3 times"


def abort(rank: int, size: int, pipe: Pipe) -> str:
    """The last rank never calls; the others are told, and make a new communicator without it."""
    if size == 1:
        return "needs 2 GPUs"
    comm = join(rank, size, pipe)
    tensor = torch.ones(1 << 20, device=comm.device)
    comm.all_reduce(tensor).wait()
    if rank == size - 1:
        pipe[0].recv()
        comm.abort("hangs", rank)
        return "hung on purpose"
    work = comm.all_reduce(tensor)
    time.sleep(0.5)  # the kernel spins on the GPU by now
    assert not work.is_completed()
    begin = time.monotonic()
    comm.abort("hangs", size - 1)
    try:
        work.wait(10)
    except PeerLostError as error:
        assert error.rank == size - 1  # noqa: PT017
    torch.cuda.synchronize()
    aborted = time.monotonic()
    survivors = join(rank, size - 1, pipe)
    tensor.fill_(1)
    survivors.all_reduce(tensor).wait()
    assert tensor[0].item() == size - 1
    done = time.monotonic()
    survivors.close()
    pipe[0].send(("release", None))
    return f"aborted in {1e3 * (aborted - begin):.0f} ms, made anew in {1e3 * (done - aborted):.0f} ms"


def _trained(rank: int, size: int, backend: str, sharded: bool) -> list[torch.Tensor]:
    """The parameters after a few steps on the given backend."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    store = Path(tempfile.gettempdir()) / f"hardware-{os.getppid()}-{backend.replace(':', '-')}-{sharded}"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
    model: Any = torch.nn.Sequential(block, torch.nn.LayerNorm(256)).cuda()
    if sharded:
        fully_shard(model[0])
        fully_shard(model)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank], bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(5):
        generator = torch.Generator("cuda").manual_seed(100 * step + rank)
        model(torch.randn(32, 256, device="cuda", generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [(each.full_tensor() if sharded else each).detach().cpu() for each in model.parameters()]
    dist.destroy_process_group()
    store.unlink(missing_ok=True)
    return weights


def _same_training(rank: int, size: int, sharded: bool) -> str:
    import_module("monarch_slurm.collectives.c10d")
    ours = _trained(rank, size, "cpu:gloo,cuda:monarch", sharded)
    theirs = _trained(rank, size, "nccl", sharded)
    assert len(ours) == len(theirs)
    assert all(torch.equal(mine, peer) for mine, peer in zip(ours, theirs, strict=True))
    return f"{len(ours)} parameters bit for bit those of torch's NCCL backend after 5 steps"


def ddp(rank: int, size: int, _pipe: Pipe) -> str:
    return _same_training(rank, size, sharded=False)


def fsdp2(rank: int, size: int, _pipe: Pipe) -> str:
    return _same_training(rank, size, sharded=True)


def dtensor(rank: int, size: int, _pipe: Pipe) -> str:
    """A two-layer block with its weights sharded by columns and rows, against the same block on one GPU."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    import_module("monarch_slurm.collectives.c10d")
    store = Path(tempfile.gettempdir()) / f"hardware-{os.getppid()}-dtensor"
    dist.init_process_group("cpu:gloo,cuda:monarch", init_method=f"file://{store}", rank=rank, world_size=size)
    torch.manual_seed(0)
    first = torch.nn.Linear(64, 256)
    block = torch.nn.Sequential(first, torch.nn.GELU(), torch.nn.Linear(256, 64)).cuda().double()
    x = torch.randn(8, 64, device="cuda", dtype=torch.float64)
    want = block(x)
    want.sum().backward()
    assert first.weight.grad is not None
    gradient = first.weight.grad.clone()
    block.zero_grad()
    mesh = init_device_mesh("cuda", (size,))
    parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    got = block(x)
    got.sum().backward()
    torch.testing.assert_close(got, want)
    sharded: Any = first.weight.grad
    torch.testing.assert_close(sharded.full_tensor(), gradient)
    dist.destroy_process_group()
    store.unlink(missing_ok=True)
    return "a tensor-parallel block and its gradient equal those on one GPU in float64"


def c10d_ops(rank: int, size: int, _pipe: Pipe) -> str:
    """What DDP and FSDP2 do not use: lists, gather, scatter, all_to_all, sends in a batch, new groups, barrier."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import _make_nccl_premul_sum as premul_sum

    import_module("monarch_slurm.collectives.c10d")
    store = Path(tempfile.gettempdir()) / f"hardware-{os.getppid()}-ops"
    dist.init_process_group("cpu:gloo,cuda:monarch", init_method=f"file://{store}", rank=rank, world_size=size)
    mine = torch.full((3,), float(rank), device="cuda")
    everyone = [torch.full((3,), float(peer)) for peer in range(size)]
    total = float(sum(range(size)))

    def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True)), (got, want)

    parts = [torch.empty(3, device="cuda") for _ in range(size)]
    dist.all_gather(parts, mine)
    same(parts, everyone)
    dist.all_to_all(parts, [mine] * size)
    same(parts, everyone)
    dist.gather(mine, parts if rank == 0 else None, dst=0)
    dist.scatter(mine, parts if rank == 0 else None, src=0)
    same([mine], [everyone[rank]])
    one = torch.empty(3, device="cuda")
    dist.reduce_scatter(one, [mine] * size)
    same([one], [torch.full((3,), total)])
    whole = torch.empty(3 * size, device="cuda")
    dist.all_to_all_single(whole, mine.repeat(size))
    same([whole], [torch.cat(everyone)])
    towards, back = (rank + 1) % size, (rank - 1) % size
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, towards), dist.P2POp(dist.irecv, one, back)]):
        work.wait()
    same([one], [everyone[back]])
    group = dist.new_group(list(range(size)), backend="cpu:gloo,cuda:monarch")
    handle = dist.all_reduce(mine, group=group, async_op=True)
    handle.wait()
    same([mine], [torch.full((3,), total)])
    for factor in (0.5, torch.full((1,), 0.5, device="cuda")):  # FSDP2 scales gradients so
        scaled = torch.full((3,), float(rank), device="cuda")
        dist.all_reduce(scaled, op=premul_sum(factor))
        same([scaled], [torch.full((3,), total / 2)])
    on_cpu = torch.ones(2)
    dist.all_reduce(on_cpu)
    assert on_cpu.tolist() == [float(size)] * 2
    dist.barrier()
    dist.destroy_process_group()
    store.unlink(missing_ok=True)
    return "lists, gather, scatter, all_to_all, batched sends, a new group, barrier; CPU tensors beside them"


def _titan_files(folder: Path) -> None:
    """Write what TorchTitan needs: a tokenizer, and text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    lines = [
        line for path in sorted(Path(__file__).parents[2].glob("site/*.md")) for line in path.open() if line.strip()
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=1000, special_tokens=["<s>", "</s>"]))
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (folder / "text").mkdir()
    (folder / "text" / "data.json").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))


def _titan(rank: int, size: int, port: int, folder: str, name: str) -> list[torch.Tensor]:
    """The parameters of TorchTitan's smallest Llama after a few steps."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=f"{folder}/datasets{rank}")
    import torch.distributed as dist
    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    options = {
        "model.name": "llama3", "model.flavor": "debugmodel", "model.hf_assets_path": f"{folder}/tokenizer",
        "training.dataset": "c4_test", "training.dataset_path": f"{folder}/text", "training.steps": "10",
        "training.seq_len": "256", "training.local_batch_size": "8", "lr_scheduler.warmup_steps": "2",
        "debug.seed": "1", "job.dump_folder": f"{folder}/{name}",
    }  # fmt: skip
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    trainer = Trainer(ConfigManager().parse_args([*words, "--debug.deterministic"]))
    trainer.train()
    (model,) = trainer.model_parts
    assert f"cuda:{name}" in dist.get_backend_config()
    weights = [each.full_tensor().cpu() for each in model.parameters()]
    trainer.close()
    dist.destroy_process_group()
    return weights


def torchtitan(rank: int, size: int, pipe: Pipe) -> str:
    """TorchTitan 0.2 with FSDP2, unchanged, on this backend and on torch's NCCL."""
    import torch.distributed as dist

    if find_spec("torchtitan") is None:
        return "not done: torchtitan is not installed"
    c10d = import_module("monarch_slurm.collectives.c10d")
    if rank == 0:
        folder = tempfile.mkdtemp()
        _titan_files(Path(folder))
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
            pipe[0].send(("invitation", (folder, one.getsockname()[1], other.getsockname()[1])))
    folder, *ports = pipe[0].recv()
    usual = dist.Backend.default_device_backend_map["cuda"]
    c10d.use_for_gpus()
    ours = _titan(rank, size, ports[0], folder, "monarch")
    dist.Backend.default_device_backend_map["cuda"] = usual
    theirs = _titan(rank, size, ports[1], folder, usual)
    assert all(torch.equal(mine, peer) for mine, peer in zip(ours, theirs, strict=True))
    return f"TorchTitan's Llama: {len(ours)} parameters bit for bit those on {usual} after 10 steps of FSDP2"


CHECKS: list[Callable[[int, int, Pipe], str]] = [
    facts,
    memory,
    reductions,
    float8,
    moves,
    graph,
    abort,
    ddp,
    fsdp2,
    dtensor,
    c10d_ops,
    torchtitan,
]


MESH_CHECKS = [
    "killed_rank",
    "replaced_rank",
    "killed_rank_distributed",
    "torchft_replicas",
    "buffers",
    "bounced_buffers",
]


def rank_main(check: Callable[[int, int, Pipe], str], rank: int, size: int, pipe: Any, fd: int) -> None:
    try:
        torch.cuda.set_device(rank)
        text = check(rank, size, (pipe, None, fd))
        pipe.send(("done", text))
    except BaseException:
        pipe.send(("error", f"rank {rank}: {traceback.format_exc(limit=-3)}"))
    os._exit(0)


def run(check: Callable[[int, int, Pipe], str], size: int) -> tuple[bool, str]:
    """Run a check with one process for each GPU; carries invitations between them."""
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    sockets = socket.socketpair()
    for rank in range(size):
        ours, theirs = context.Pipe()
        fd = sockets[rank % 2].fileno()
        processes.append(context.Process(target=rank_main, args=(check, rank, size, theirs, fd), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    results: list[str | None] = [None] * size
    ok, deadline = True, time.monotonic() + DEADLINE_S
    while None in results and time.monotonic() < deadline:
        for ready in multiprocessing.connection.wait([p for p, r in zip(pipes, results, strict=True) if r is None], 1):
            pipe: Any = ready
            kind, value = pipe.recv()
            if kind == "invitation":
                for other, result in zip(pipes, results, strict=True):
                    if result is None:
                        other.send(value)
            elif kind == "release":
                pipes[-1].send(None)
            else:
                results[pipes.index(pipe)] = value
                ok = ok and kind == "done"
                if kind == "error":
                    deadline = min(deadline, time.monotonic() + 5)
    for process in processes:
        process.kill()
    if None in results:
        return False, f"no answer of ranks {[i for i, r in enumerate(results) if r is None]}; {results}"
    return ok, str(results[0] if ok else "; ".join(map(str, results)))


def run_on_a_mesh(check: str, size: int) -> tuple[bool, str]:
    """Run a check of `meshes`: a program with actors, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=import_module("meshes").main, args=(check, size, theirs))
    process.start()
    told = multiprocessing.connection.wait([ours, process.sentinel], DEADLINE_S)
    ok, text = ours.recv() if ours in told else (False, "ended without an answer" if told else "no answer")
    process.join(10)
    process.kill()  # its procs end with it
    return ok, text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="names of checks")
    arguments = parser.parse_args()
    build_native(["_native", "_c10d"])
    size = arguments.gpus or len(gpu_devices())
    rows = []
    every = [*((check.__name__, partial(run, check)) for check in CHECKS)]
    every += [(name, partial(run_on_a_mesh, name)) for name in MESH_CHECKS]
    for name, check in every:
        if arguments.only and name not in arguments.only:
            continue
        begin = time.monotonic()
        ok, text = check(size)
        rows.append({"check": name, "gpus": size, "ok": ok, "seconds": time.monotonic() - begin, "what": text})
        print(f"{name:<23} {'ok' if ok else 'FAILED':<6} {rows[-1]['seconds']:5.1f} s  {text}", flush=True)
    print(f"platform {gpu_platform()}, {size} GPUs, torch {torch.__version__}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    sys.exit(sum(not row["ok"] for row in rows))


if __name__ == "__main__":
    main()
