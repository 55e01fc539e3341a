"""The shapes of the built-in Llama, from a size for tests to the published 8B. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from monarch_slurm.errors import ConfigError
from monarch_slurm.train.corpus import VOCAB


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the rotary frequencies to a longer context.

    Attributes:
        factor: by how much the slow frequencies are slowed down.
        low_freq_factor: frequencies with fewer than this many turns in ``original_context`` are slowed by ``factor``.
        high_freq_factor: those with more turns than this stay as they are; between the two the factor is blended.
        original_context: tokens of the context that the model was first trained with.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a model.

    Attributes:
        dim: width of the residual stream.
        layers: decoder blocks.
        heads: query heads; divides ``dim``.
        kv_heads: key and value heads; divides ``heads``.
        ffn: width of the feed-forward layer.
        vocab: size of the vocabulary; 256 is one entry per byte.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how they are stretched; None leaves them.
        norm_eps: added to the mean square in RMSNorm.
        tied: the output projection is the embedding.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int = 256
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied: bool = False

    def __post_init__(self) -> None:
        if self.dim % self.heads or self.heads % self.kv_heads or (self.dim // self.heads) % 2:
            raise ValueError(
                f"heads ({self.heads}) must divide dim ({self.dim}) into even parts, kv_heads ({self.kv_heads}) heads"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.heads


# "8b" is the published Llama 3.1 8B (its model card and params.json) and "1b" the published Llama 3.2 1B, tied as that
# one is. The smaller ones keep the proportions; their vocabulary is the byte.
CONFIGS: dict[str, LlamaConfig] = {
    "tiny": LlamaConfig(dim=96, layers=3, heads=4, kv_heads=2, ffn=256),
    "debug": LlamaConfig(dim=256, layers=4, heads=8, kv_heads=4, ffn=704),
    "160m": LlamaConfig(dim=768, layers=24, heads=12, kv_heads=4, ffn=2208),
    "1b": LlamaConfig(
        dim=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        ffn=8192,
        vocab=128_256,
        rope_scaling=RopeScaling(factor=32.0),
        tied=True,
    ),
    "8b": LlamaConfig(dim=4096, layers=32, heads=32, kv_heads=8, ffn=14_336, vocab=128_256, rope_scaling=RopeScaling()),
}


def model_config(name: str) -> LlamaConfig:
    """Return a configuration of `CONFIGS` with the vocabulary of byte tokens.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in CONFIGS:
        raise ConfigError(f"there is no model {name!r}; choose one of {', '.join(CONFIGS)}")
    known = CONFIGS[name]
    return replace(known, vocab=VOCAB)
