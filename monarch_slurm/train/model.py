"""What an engine trains: the model that a run describes, sharded over the ranks of a replica, and its optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from monarch_slurm.train.config import TrainConfig
from monarch_slurm.train.llama import Llama, init_parameters
from monarch_slurm.train.llama_config import LlamaConfig
from monarch_slurm.train.replica import Replica


def make_model(shape: LlamaConfig, seed: int, replica: Replica) -> Llama:
    """Return a model with the parameters that ``seed`` gives, this rank's share of them on its device."""
    with torch.device("meta"):
        model = Llama(shape)
    if replica.mesh is not None:
        on_gpu = replica.device.type == "cuda"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if on_gpu else MixedPrecisionPolicy()
        for block in model.blocks:
            fully_shard(block, mesh=replica.mesh, mp_policy=policy)
        fully_shard(model, mesh=replica.mesh, mp_policy=policy)
    model.to_empty(device=replica.device)
    init_parameters(model, seed)
    return model


def make_optimizer(config: TrainConfig, model: Llama) -> torch.optim.AdamW:
    """Return the inner optimizer; norms have no weight decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    norms = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True)
