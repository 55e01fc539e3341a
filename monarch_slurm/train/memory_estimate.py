"""How much memory a rank of the built-in Llama needs, and how much there is: compared before anything starts.

Nothing here needs torch, so that a login node can refuse a job that its nodes would kill.
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monarch_slurm.errors import ConfigError
from monarch_slurm.gpu import gpu_devices
from monarch_slurm.job.errors import JobError
from monarch_slurm.job.status import Run, run_command
from monarch_slurm.train.config import TrainConfig
from monarch_slurm.train.llama_config import LlamaConfig, model_config

FLOAT32 = 4
"""Bytes of a parameter; also of its gradient, and of each of the moments."""

COPIES = {
    "parameters": 1,
    "gradients": 1,
    "AdamW's moments": 2,  # Kingma & Ba, arXiv 1412.6980: one of the gradient, one of its square
    "parameters of the last sync": 1,  # DiLoCo, arXiv 2311.08105: what the outer gradient is the difference to
    "outer momentum": 1,  # the same: SGD with Nesterov momentum
    "outer gradients": 1,  # held while a sync averages them
    "parameters before the sync": 1,  # torchft's DiLoCo keeps them until the sync is committed
}
"""Tensors as large as the model that a trainer holds at a sync, when it holds the most of them."""

PROCESS_BYTES = 300 * 2**20
"""A trainer before it has a model: Python, torch, threads. Most of it is shared with the zygote."""


def parameters(shape: LlamaConfig) -> int:
    """Return the number of parameters.

    Of each layer: queries and output ``2 D^2``, keys and values ``2 D K E``, SwiGLU ``3 D F``, two norms ``2 D``; then
    the embedding, the last norm, and the output projection unless it is the embedding (arXiv 2407.21783).
    """
    keys = shape.kv_heads * shape.head_dim
    layer = 2 * shape.dim**2 + 2 * shape.dim * keys + 3 * shape.dim * shape.ffn + 2 * shape.dim
    return shape.layers * layer + shape.dim + shape.vocab * shape.dim * (1 if shape.tied else 2)


def activations(shape: LlamaConfig, tokens: int) -> int:
    """Return the number of values that a forward pass keeps for the backward pass.

    Per token and layer, of what `monarch_slurm.train.llama` computes: the inputs of two norms and their results
    (``4 D``), the queries before and after their rotation, keys and values repeated for all heads, and the attention's
    output (``5 D``), and of SwiGLU its two products, the gate and what enters ``w2`` (``4 F``). Attention keeps no
    matrix of ``T x T`` (FlashAttention, arXiv 2205.14135). Then the logits, their logarithms and their gradient. The
    way of counting is that of Korthikanti et al., arXiv 2205.05198.
    """
    return tokens * (shape.layers * (9 * shape.dim + 4 * shape.ffn) + 3 * shape.vocab)


def rank_bytes(config: TrainConfig) -> int:
    """Return how many bytes one trainer needs at its peak, in float32."""
    shape = model_config(config.model)
    own = parameters(shape) / config.procs_per_replica
    model = own * FLOAT32 * sum(COPIES.values())
    computing = activations(shape, config.batch_size * config.seq_len) * FLOAT32
    if config.procs_per_replica > 1:  # FSDP gathers one unit at a time: a layer, or what is around the layers
        whole = max(parameters(shape) / shape.layers, 2 * shape.vocab * shape.dim)
        computing += int(2 * whole * FLOAT32)
    # A sync and a step do not coincide, but the allocator keeps what the other has used.
    return PROCESS_BYTES + int(model) + computing


def check_memory(config: TrainConfig, nodes: int, have: int | None, where: str, of: str = "node") -> None:
    """Refuse a run whose trainers need more memory than there is.

    Args:
        nodes: number of nodes over which the trainers are spread.
        have: bytes of each node; None if that is not known, which refuses nothing.
        where: what has the memory, for the message.
        of: what they are spread over, if not nodes.

    Raises:
        ConfigError: it needs more; the text has both figures.
    """
    if have is None or config.engine != "llama":
        return
    ranks = math.ceil(config.replicas * config.procs_per_replica / nodes)
    need = ranks * rank_bytes(config)
    if need > have:
        trainers = f"{ranks} trainer{'s' * (ranks > 1)} of {gigabytes(rank_bytes(config))} each"
        raise ConfigError(
            f"--model {config.model} needs about {gigabytes(need)} of memory on each {of} ({trainers}), "
            f"and {where} {gigabytes(have)}: take more nodes, a higher "
            "--procs-per-replica, fewer --replicas or a smaller model, or try anyway with --force"
        )


def check_nodes(config: TrainConfig, nodes: int, arguments: Mapping[str, Any], run: Run = run_command) -> None:
    """Refuse a job of Slurm whose nodes have too little memory, as far as Slurm tells; for nodes without GPUs.

    Args:
        nodes: how many are used.
        arguments: of `SlurmJob`.

    Raises:
        ConfigError: they have; the text has both figures.
    """
    words = (arguments.get("gres"), *arguments.get("slurm_args", ()))
    if arguments.get("gpus_per_node") is not None or any("gpu" in str(word) for word in words):
        return  # how much memory the GPUs have is known on the nodes alone
    asked = asked_memory(arguments.get("mem"))
    try:
        there = slurm_memory(arguments.get("partition"), run)
    except JobError:
        return  # submitting says what is wrong with Slurm
    if asked is not None and (there is None or asked <= there):
        check_memory(config, nodes, asked, f"--mem {arguments['mem']} is")
    else:
        check_memory(config, nodes, there, "the smallest node of the partition has")


def check_here(config: TrainConfig, nodes: int) -> None:
    """Refuse a run for which this machine, one of ``nodes`` like ones, has too little memory, or its GPUs have.

    Raises:
        ConfigError: they have; the text has both figures.
    """
    devices = gpu_devices()
    if not devices:
        check_memory(config, nodes, machine_memory(), f"{socket.gethostname()} has")
        return
    sizes = [device.memory_bytes for device in devices if device.memory_bytes is not None]
    if len(sizes) == len(devices):
        check_memory(config, nodes * len(devices), min(sizes), "each has", "GPU")


def slurm_memory(partition: str | None, run: Run = run_command) -> int | None:
    """Return the bytes of memory of the smallest node of a partition; None for the default partition.

    None is returned if Slurm does not say.
    """
    chosen = ["-p", partition] if partition is not None else []
    sizes = []
    for line in run(["sinfo", "-h", "-N", *chosen, "-o", "%P|%m"]).stdout.splitlines():
        name, _, size = line.partition("|")
        if (partition is not None or name.endswith("*")) and size.rstrip("+").isdecimal():
            sizes.append(int(size.rstrip("+")) * 2**20)
    return min((size for size in sizes if size > 2**20), default=None)


def asked_memory(mem: str | None) -> int | None:
    """Return the bytes of sbatch's ``--mem``; None for none, for all of a node, and for what is no such text."""
    units = {"": 2**20, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    text = (mem or "").upper().removesuffix("B")
    number, unit = (text[:-1], text[-1]) if text[-1:].isalpha() else (text, "")
    if not number.isdecimal() or unit not in units:
        return None
    return int(number) * units[unit] or None


def machine_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that this process may use: of the machine, or of its cgroup if that has less."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                found.append(int(line.split()[1]) * 2**10)
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                found += _limits(root / "sys/fs/cgroup", path, "memory.max")
            elif "memory" in controllers.split(","):
                found += _limits(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes")
    return min(found, default=None)


def _limits(base: Path, path: str, name: str) -> list[int]:
    """Return the limits of a cgroup and of those around it."""
    folder, found = base / path.strip("/"), []
    while True:
        with contextlib.suppress(OSError, ValueError):
            found.append(int((folder / name).read_text()))
        if folder == base or base not in folder.parents:
            return found
        folder = folder.parent


def gigabytes(size: float) -> str:
    """Return ``1.5 GiB`` for a number of bytes."""
    return f"{size / 2**30:.1f} GiB" if size < 100 * 2**30 else f"{size / 2**30:.0f} GiB"
