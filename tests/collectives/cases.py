"""Every operation against a float64 reference, for one rank; the same on CPUs (gloo) and GPUs (NCCL, RCCL)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monarch_slurm.collectives import Communicator

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
UNSIGNED = [torch.uint32, torch.uint64]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
SIZES = [0, 1, 7, 1000, 65537]


def data(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, so that sums and products of a few ranks are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    return torch.randint(1, 4, (numel,), generator=generator).to(dtype)


def reference(op: str, size: int, numel: int) -> torch.Tensor:
    parts = torch.stack([data(rank, numel, torch.float64) for rank in range(size)])
    return {
        "sum": lambda: parts.sum(0),
        "avg": lambda: parts.mean(0),
        "prod": lambda: parts.prod(0),
        "max": lambda: parts.amax(0),
        "min": lambda: parts.amin(0),
    }[op]()


def tolerance_of(op: str, dtype: torch.dtype) -> float:
    """The relative error that rounding leaves: 9 is no number of 8 bits, for one, and a third is none of 16."""
    return 0.25 if dtype in FLOAT8 else 1e-2 if op == "avg" else 0.0


def expect(what: str, got: torch.Tensor, want: torch.Tensor, tolerance: float = 0.0) -> None:
    got, want = got.cpu().double(), want.cpu().double()
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    assert torch.allclose(got, want, rtol=tolerance, atol=0), f"{what}: {got[:8]}, expected {want[:8]}"


def check_reductions(comm: Communicator, dtypes: Sequence[torch.dtype] = DTYPES) -> int:
    """all_reduce, reduce and reduce_scatter of every dtype, reduction and size; returns how many were checked."""
    checked = 0
    for dtype in dtypes:
        for op in ("sum", "prod", "max", "min", *(["avg"] if dtype.is_floating_point else [])):
            for numel in SIZES:
                what = f"{op} of {numel} {dtype}"
                want, tolerance = reference(op, comm.size, numel), tolerance_of(op, dtype)
                tensor = data(comm.rank, numel, dtype).to(comm.device)
                comm.all_reduce(tensor, op).wait()
                expect(f"all_reduce {what}", tensor, want, tolerance)
                tensor = data(comm.rank, numel, dtype).to(comm.device)
                root = comm.size - 1
                comm.reduce(tensor, root, op).wait()
                expect(
                    f"reduce {what}", tensor, want if comm.rank == root else data(comm.rank, numel, dtype), tolerance
                )
                output = torch.empty(numel, dtype=dtype, device=comm.device)
                source = data(comm.rank, numel * comm.size, dtype).to(comm.device)
                comm.reduce_scatter(output, source, op).wait()
                part = reference(op, comm.size, numel * comm.size).chunk(comm.size)[comm.rank] if numel else want
                expect(f"reduce_scatter {what}", output, part, tolerance)
                checked += 3
    return checked


def check_rough_values(comm: Communicator) -> int:
    """Sums and averages of values of all signs and magnitudes, and averages that a sum would not hold."""
    checked, numel = 0, 1000
    for dtype in FLOATS:
        limits, parts = torch.finfo(dtype), []
        for rank in range(comm.size):
            generator = torch.Generator().manual_seed(rank)
            powers = torch.randint(-8, 8, (numel,), generator=generator).double()
            parts.append((torch.randn(numel, dtype=torch.float64, generator=generator) * 2**powers).to(dtype))
        wide = torch.stack(parts).double()
        rounding = limits.eps * comm.size * wide.abs().sum(0)
        for op, want in (("sum", wide.sum(0)), ("avg", wide.mean(0))):
            tensor = parts[comm.rank].to(comm.device, copy=True)
            comm.all_reduce(tensor, op).wait()
            error = (tensor.cpu().double() - want).abs()
            assert (error <= rounding).all(), f"{op} of {dtype}: off by {(error / rounding).max()} of its rounding"
        large = torch.tensor([0.9, -0.9, 0.5], dtype=torch.float64).mul(limits.max).to(dtype)
        ends = comm.size - 1
        scattered, reduced, gathered = torch.empty_like(large), large.clone(), large.clone()
        scattered, reduced, gathered = (each.to(comm.device) for each in (scattered, reduced, gathered))
        comm.reduce_scatter(scattered, gathered.repeat(comm.size), "avg").wait()
        comm.reduce(reduced, ends, "avg").wait()
        comm.all_reduce(gathered, "avg").wait()
        for what, got in (("all_reduce", gathered), ("reduce", reduced), ("reduce_scatter", scattered)):
            expect(f"{what} of large {dtype}", got, large, 4 * limits.eps)
        checked += 5
    return checked


def check_unsigned(comm: Communicator) -> int:
    """Sums, maxima and minima of unsigned numbers that a signed dtype of their size would not hold."""
    for dtype in UNSIGNED:
        top = torch.iinfo(dtype).max
        parts = [[top - comm.size + 1 if rank == 0 else 1, top if rank == 0 else 0] for rank in range(comm.size)]
        for op, of_all in (("sum", sum), ("max", max), ("min", min)):
            tensor = torch.tensor(parts[comm.rank], dtype=dtype).to(comm.device)
            comm.all_reduce(tensor, op).wait()
            want = [of_all(values) for values in zip(*parts, strict=True)]
            assert tensor.tolist() == want, f"{op} of {dtype}: {tensor.tolist()}, expected {want}"
    return 3 * len(UNSIGNED)


def check_moves(comm: Communicator) -> int:
    """Every operation that moves tensors, of every dtype and of those that cannot be reduced."""
    checked = 0
    rank, size, device = comm.rank, comm.size, comm.device
    for dtype in [*DTYPES, *UNSIGNED, torch.bool, torch.float8_e4m3fn, torch.complex64]:
        for numel in SIZES:
            parts = [data(each, numel, torch.float32).to(dtype) for each in range(size)]
            everything = torch.cat(parts).to(device)
            mine = parts[rank].to(device)

            def same(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
                assert torch.equal(got.cpu().view(torch.uint8), want.cpu().view(torch.uint8)), f"{what} {numel} {dtype}"  # noqa: B023

            output = torch.empty_like(everything)
            comm.all_gather(output, mine).wait()
            same("all_gather", output, everything)
            tensor = mine.clone()
            comm.broadcast(tensor, size - 1).wait()
            same("broadcast", tensor, parts[-1])
            output = torch.empty_like(everything)
            comm.all_to_all(output, mine.repeat(size)).wait()
            same("all_to_all", output, everything)
            whole = torch.empty_like(everything) if rank == 0 else None
            comm.gather(whole, mine, 0).wait()
            if whole is not None:
                same("gather", whole, everything)
            part = torch.empty_like(mine)
            comm.scatter(part, everything if rank == size - 1 else None, size - 1).wait()
            same("scatter", part, mine)
            if size > 1:
                received = torch.empty_like(mine)
                with comm.group():
                    sent = comm.send(mine, (rank + 1) % size)
                    got = comm.recv(received, (rank - 1) % size)
                sent.wait()
                got.wait()
                same("send and recv", received, parts[(rank - 1) % size])
            checked += 6
    counts = [[(source + target) % 3 for target in range(size)] for source in range(size)]
    outgoing = torch.cat([torch.full((counts[rank][to],), 10.0 * rank + to) for to in range(size)]).to(device)
    expected = torch.cat([torch.full((counts[by][rank],), 10.0 * by + rank) for by in range(size)])
    output = torch.empty(len(expected), device=device)
    comm.all_to_all_v(output, outgoing, [counts[by][rank] for by in range(size)], counts[rank]).wait()
    expect("all_to_all_v", output, expected)
    comm.barrier().wait()
    return checked + 2


def check_split(comm: Communicator) -> None:
    """Split into odd and even ranks; the communicators work beside each other, and a rank in no list gets None."""
    evens, odds = list(range(0, comm.size, 2)), list(range(1, comm.size, 2))[::-1]
    part = comm.split([evens, odds])
    assert part is not None
    mine = evens if comm.rank % 2 == 0 else odds
    assert (part.rank, part.size) == (mine.index(comm.rank), len(mine))
    tensor = torch.full((5,), float(comm.rank), device=comm.device)
    part.all_reduce(tensor).wait()
    expect("all_reduce of a part", tensor, torch.full((5,), float(sum(mine))))
    part.close()
    rest = comm.shrink([0])
    assert (rest is None) == (comm.rank == 0)
    if rest is not None:
        tensor = torch.ones(1, device=comm.device)
        rest.all_reduce(tensor).wait()
        expect("all_reduce without rank 0", tensor, torch.tensor([comm.size - 1.0]))
        rest.close()
    comm.barrier().wait()
