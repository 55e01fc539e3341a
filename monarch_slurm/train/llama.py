"""A Llama 3 decoder in plain torch, from a size for tests to the published 8B.

The architecture is that of "The Llama 3 Herd of Models" (arXiv 2407.21783): pre-normalised blocks (RMSNorm, arXiv
1910.07467) of grouped-query attention (arXiv 2305.13245) with rotary positions (arXiv 2104.09864) and a SwiGLU
feed-forward layer (arXiv 2002.05202). Shapes in this module: ``B`` sequences, ``T`` tokens in a sequence, ``D`` model
dimension, ``H`` query heads, ``K`` key/value heads, ``E = D / H`` the dimension of a head, ``V`` vocabulary.

Parameters are drawn per tensor from (seed, name), so that the values do not depend on the order of construction nor on
how the tensors are sharded: replicas of one seed start equal without having to send each other anything.
"""

from __future__ import annotations

import math
import zlib

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from monarch_slurm.train.llama_config import LlamaConfig


def rope_frequencies(config: LlamaConfig) -> Tensor:
    """Return the rotary angle per token of each pair of a head's dimensions.

    Returns:
        ``(E / 2,)`` float64, radians per token: ``theta ** (-2 i / E)``, scaled as Llama 3.1's model card says.
    """
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device="cpu")
    frequencies = config.rope_theta ** (-pairs / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_context * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


def rope_table(config: LlamaConfig, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every position's angles, each ``(tokens, E / 2)`` float32 on ``device``."""
    angles = torch.outer(torch.arange(tokens, dtype=torch.float64, device="cpu"), rope_frequencies(config))
    return angles.cos().float().to(device), angles.sin().float().to(device)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs of each head's dimensions by their position's angle.

    Args:
        x: ``(B, T, heads, E)``, any floating dtype.
        cos: ``(T, E / 2)`` float32.
        sin: ``(T, E / 2)`` float32.

    Returns:
        The rotated heads, shape and dtype of ``x``; the rotation itself is done in float32.
    """
    pairs = x.float().view(*x.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention: every ``H / K`` query heads share one key and value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.wq = nn.Linear(config.dim, config.heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend from each token to itself and those before it: ``(B, T, D)`` to ``(B, T, D)``."""
        batch, tokens, _ = x.shape
        q = apply_rope(self.wq(x).view(batch, tokens, self.heads, self.head_dim), cos, sin).transpose(1, 2)
        k = apply_rope(self.wk(x).view(batch, tokens, self.kv_heads, self.head_dim), cos, sin).transpose(1, 2)
        v = self.wv(x).view(batch, tokens, self.kv_heads, self.head_dim).transpose(1, 2)
        # Keys and values are repeated by hand: SDPA's own grouping leaves the fused kernels on some backends.
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, tokens, -1))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU: ``w2(silu(w1 x) * w3 x)``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn, bias=False)
        self.w2 = nn.Linear(config.ffn, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token by itself: ``(B, T, D)`` to ``(B, T, D)``."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One decoder layer; the unit that parameters are sharded by."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add attention and feed-forward to the residual stream ``(B, T, D)``."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """The decoder. Its parameters hold nothing of use until `init_parameters` has drawn them.

    Build it under ``torch.device("meta")`` and give it memory with ``to_empty`` when it is to be sharded first.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = None if config.tied else nn.Linear(config.dim, config.vocab, bias=False)
        self._rope: tuple[Tensor, Tensor] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token, ``(B, T, V)``, for ``tokens``, ``(B, T)`` int64."""
        length = tokens.shape[1]
        if self._rope is None or self._rope[0].shape[0] < length or self._rope[0].device != tokens.device:
            self._rope = rope_table(self.config, length, tokens.device)
        cos, sin = self._rope[0][:length], self._rope[1][:length]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.norm(x)
        return F.linear(x, self.embedding.weight) if self.output is None else self.output(x)


def loss_function(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats of ``logits`` ``(B, T, V)`` against ``targets`` ``(B, T)`` int64."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters, of the whole model also where they are sharded."""
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def init_parameters(model: Llama, seed: int) -> None:
    """Draw all parameters: norms 1, matrices normal with deviation 0.02, those that write to the residual stream less.

    The deviation of ``wo`` and ``w2`` is divided by ``sqrt(2 layers)``, as in GPT-2, so that the residual stream does
    not grow with depth. Each tensor has its own generator on its device; a sharded tensor gets its rows of the values
    that the whole would have had. One whole tensor at a time is in memory.
    """
    narrow = 0.02 / math.sqrt(2 * model.config.layers)
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if name.endswith("norm.weight"):
            local.fill_(1.0)
            continue
        generator = torch.Generator(device=local.device)
        # 32 bits, because the CPU generator ignores the higher ones.
        generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        deviation = narrow if name.endswith(("wo.weight", "w2.weight")) else 0.02
        if isinstance(parameter, DTensor):
            whole = torch.empty(parameter.shape, dtype=local.dtype, device=local.device)
            whole.normal_(0.0, deviation, generator=generator)
            local.copy_(_local_rows(whole, parameter))
        else:
            local.normal_(0.0, deviation, generator=generator)


def _local_rows(whole: Tensor, parameter: DTensor) -> Tensor:
    """Return this rank's part of ``whole``, for a one-dimensional mesh; a shard is a `torch.chunk`, as DTensor's is."""
    (placement,) = parameter.placements
    if not isinstance(placement, Shard):
        return whole
    chunks = whole.chunk(parameter.device_mesh.size(), dim=placement.dim)
    rank = parameter.device_mesh.get_local_rank()
    # chunk() returns fewer parts than asked for when the dimension is short; the ranks beyond hold nothing.
    return chunks[rank] if rank < len(chunks) else whole.narrow(placement.dim, 0, 0)
