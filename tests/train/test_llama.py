"""The model against independent formulas, published sizes, and a real training run."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
import torch.nn.functional as F

from monarch_slurm.train.data import Sampler, split_corpus
from monarch_slurm.train.llama import (
    Attention,
    Llama,
    apply_rope,
    count_parameters,
    init_parameters,
    loss_function,
    rope_frequencies,
    rope_table,
)
from monarch_slurm.train.llama_config import CONFIGS, LlamaConfig, RopeScaling

SMALL = LlamaConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn=48)


def make(config: LlamaConfig, seed: int = 0) -> Llama:
    model = Llama(config)
    init_parameters(model, seed)
    return model


@pytest.mark.parametrize(
    ("name", "count"),
    [("8b", 8_030_261_248), ("1b", 1_235_814_400), ("160m", 160_273_152), ("debug", 3_082_496), ("tiny", 353_952)],
)
def test_parameter_count(name: str, count: int) -> None:
    with torch.device("meta"):
        assert count_parameters(Llama(CONFIGS[name])) == count


def test_published_8b_shape() -> None:
    assert CONFIGS["8b"] == LlamaConfig(
        dim=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        ffn=14_336,
        vocab=128_256,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192),
    )


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="heads"):
        LlamaConfig(dim=30, layers=1, heads=4, kv_heads=2, ffn=8)
    with pytest.raises(ValueError, match="kv_heads"):
        LlamaConfig(dim=32, layers=1, heads=4, kv_heads=3, ffn=8)


def reference_frequency(i: int, head_dim: int, theta: float, scaling: RopeScaling | None) -> float:
    """Llama 3.1's rule, one frequency at a time, by wavelength as the model card puts it."""
    frequency = 1.0 / theta ** (2 * i / head_dim)
    if scaling is None:
        return frequency
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_context / scaling.high_freq_factor:
        return frequency
    if wavelength > scaling.original_context / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


@pytest.mark.parametrize("name", ["8b", "1b", "debug"])
def test_rope_frequencies(name: str) -> None:
    config = CONFIGS[name]
    expected = [
        reference_frequency(i, config.head_dim, config.rope_theta, config.rope_scaling)
        for i in range(config.head_dim // 2)
    ]
    assert rope_frequencies(config).tolist() == pytest.approx(expected, rel=1e-12)


def test_8b_has_frequencies_of_all_three_kinds() -> None:
    ratio = rope_frequencies(CONFIGS["8b"]) / rope_frequencies(LlamaConfig(4096, 1, 32, 8, 1))
    assert ratio[0] == 1.0
    assert ratio[-1] == 1 / 8
    assert ((ratio > 0.13) & (ratio < 0.99)).any()


def test_rope_is_complex_rotation() -> None:
    x = torch.randn(1, 5, 2, SMALL.head_dim, dtype=torch.float64)
    cos, sin = rope_table(SMALL, 5, torch.device("cpu"))
    rotated = apply_rope(x, cos, sin)
    for position in range(5):
        for pair in range(SMALL.head_dim // 2):
            angle = position * reference_frequency(pair, SMALL.head_dim, SMALL.rope_theta, None)
            number = complex(*x[0, position, 1, 2 * pair : 2 * pair + 2].tolist()) * cmath.exp(1j * angle)
            assert complex(*rotated[0, position, 1, 2 * pair : 2 * pair + 2].tolist()) == pytest.approx(
                number, rel=1e-5
            )


def test_grouped_attention_is_full_attention_with_repeated_heads() -> None:
    torch.manual_seed(0)
    grouped = Attention(SMALL)
    full = Attention(LlamaConfig(dim=32, layers=1, heads=4, kv_heads=4, ffn=48))
    full.load_state_dict(grouped.state_dict() | {"wk.weight": full.wk.weight, "wv.weight": full.wv.weight})
    with torch.no_grad():
        for wide, narrow in ((full.wk, grouped.wk), (full.wv, grouped.wv)):
            heads = narrow.weight.view(2, SMALL.head_dim, 32)
            wide.weight.copy_(torch.cat([heads[0], heads[0], heads[1], heads[1]]))
    x = torch.randn(2, 7, 32)
    cos, sin = rope_table(SMALL, 7, x.device)
    torch.testing.assert_close(grouped(x, cos, sin), full(x, cos, sin))


def test_attention_by_hand() -> None:
    torch.manual_seed(0)
    attention = Attention(SMALL)
    x = torch.randn(1, 6, 32)
    cos, sin = rope_table(SMALL, 6, x.device)
    q = apply_rope(attention.wq(x).view(1, 6, 4, 8), cos, sin)
    k = apply_rope(attention.wk(x).view(1, 6, 2, 8), cos, sin)
    v = attention.wv(x).view(1, 6, 2, 8)
    out = torch.zeros(6, 4, 8)
    for head in range(4):
        for t in range(6):
            scores = torch.stack([q[0, t, head] @ k[0, s, head // 2] / math.sqrt(8) for s in range(t + 1)])
            out[t, head] = sum(w * v[0, s, head // 2] for s, w in enumerate(scores.softmax(0)))
    torch.testing.assert_close(attention(x, cos, sin)[0], attention.wo(out.flatten(1)))


def test_no_token_sees_a_later_one() -> None:
    model = make(SMALL)
    tokens = torch.randint(0, 256, (1, 12))
    changed = tokens.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_tied_output_is_the_embedding() -> None:
    model = make(LlamaConfig(dim=32, layers=1, heads=4, kv_heads=2, ffn=48, tied=True))
    assert model.output is None
    assert model(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 256)
    assert count_parameters(make(SMALL)) - count_parameters(make(LlamaConfig(**{**vars(SMALL), "tied": True}))) == 8192


def test_parameters_depend_on_the_seed_only() -> None:
    first, second, other = make(SMALL, seed=3), make(SMALL, seed=3), make(SMALL, seed=4)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name))
        if not name.endswith("norm.weight"):
            assert not torch.equal(parameter, other.get_parameter(name))
    meta = CONFIGS["tiny"]
    with torch.device("meta"):
        late = Llama(meta)
    late.to_empty(device="cpu")
    init_parameters(late, 3)
    assert all(torch.equal(p, late.get_parameter(name)) for name, p in make(meta, seed=3).named_parameters())


def test_an_untrained_model_knows_nothing() -> None:
    tokens = torch.randint(0, 256, (4, 32))
    assert loss_function(make(CONFIGS["tiny"])(tokens), tokens).item() == pytest.approx(math.log(256), rel=0.02)


def test_loss_is_cross_entropy() -> None:
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[0, 1, 2], [3, 4, 0]])
    by_hand = -sum(F.log_softmax(logits[b, t], 0)[targets[b, t]] for b in range(2) for t in range(3)) / 6
    torch.testing.assert_close(loss_function(logits, targets), by_hand)


@pytest.mark.train
def test_loss_goes_down() -> None:
    torch.set_num_threads(1)
    model = make(CONFIGS["tiny"])
    sampler = Sampler(split_corpus(None, 64), seed=0, shard=0, shards=1, batch_size=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        inputs, targets = sampler.next()
        loss = loss_function(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(256), rel=0.05)
    assert sum(losses[-10:]) / 10 < 3.2
