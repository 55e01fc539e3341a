"""A module for torchtitan's ``--module``: its smallest Llama, and what torchtitan lacks to train it without a GPU.

It is named on the command line of the runs that are tested, so that each of their processes imports it before it builds
anything. The rest is torchtitan as it is.
"""

from __future__ import annotations

import inspect
import os
import types
from typing import Any

import torch
import torchtitan.tools.utils
from torch.distributed.fsdp import FSDPModule

_CPU = "cpu"


def _no_memory(*_: Any) -> dict[str, int]:
    return {}


# torchtitan takes the accelerator, or CUDA if there is none. `torch.cpu` lacks what it asks an accelerator for.
torchtitan.tools.utils.device_type = _CPU
torchtitan.tools.utils.device_module = torch.cpu
torch.cpu.get_device_name = lambda *_: "CPU"  # type: ignore[attr-defined]
torch.cpu.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 34)  # type: ignore[attr-defined]
torch.cpu.memory_stats = _no_memory  # type: ignore[attr-defined]
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *_: None  # type: ignore[attr-defined]

import torchtitan.distributed.fsdp  # noqa: E402
from torchtitan.components.validate import Validator  # noqa: E402
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.common.decoder import Decoder  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


def _attention(self: FlexAttention, *qkv: torch.Tensor, enable_gqa: bool = False, **_: Any) -> torch.Tensor:
    """Causal attention over (B, L, N, H). FlexAttention has no backward pass on CPUs."""
    heads = (part.transpose(1, 2) for part in qkv)
    out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=enable_gqa)
    return out.transpose(1, 2)


_attention.__signature__ = inspect.signature(FlexAttention.forward)  # type: ignore[attr-defined]
FlexAttention.forward = _attention
Decoder.get_attention_masks = lambda self, positions: None


def _sum_gradients(model: torch.nn.Module) -> None:
    """Have shards sum their gradients as they are. Gloo knows no sum that multiplies first, which FSDP takes else."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


torchtitan.distributed.fsdp.disable_fsdp_gradient_division = _sum_gradients


def tiny() -> Trainer.Config:
    """torchtitan's debug model with two of its layers, on the tokenizer and the text that the test has made."""
    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel")
    del config.model_spec.model.layers[2:]
    config.hf_assets_path = os.environ["TITAN_ASSETS"]
    config.dataloader.dataset_path = os.environ["TITAN_TEXT"]
    config.training.seq_len, config.training.local_batch_size = 64, 2
    text = HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=os.environ["TITAN_TEXT"], infinite=False)
    config.validator = Validator.Config(steps=2, dataloader=text)
    return config
