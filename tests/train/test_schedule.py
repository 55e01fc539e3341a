"""Values of the learning rate that can be worked out by hand."""

from __future__ import annotations

import math

import pytest

from monarch_slurm.train.config import TrainConfig
from monarch_slurm.train.schedule import learning_rate, tokens_within_sync

CONFIG = TrainConfig(tokens=1_000_000, lr=1e-3, min_lr_ratio=0.1, warmup=0.1)


@pytest.mark.parametrize(
    ("tokens", "rate"),
    [
        (0, 0.0),
        (50_000, 0.5e-3),
        (100_000, 1e-3),
        (325_000, 1e-4 + 0.45e-3 * (1 + math.cos(math.pi / 4))),
        (550_000, 0.55e-3),
        (1_000_000, 1e-4),
        (2_000_000, 1e-4),
    ],
)
def test_learning_rate(tokens: int, rate: float) -> None:
    assert learning_rate(tokens, CONFIG) == pytest.approx(rate, abs=1e-12)


def test_without_warmup_it_starts_at_the_peak() -> None:
    assert learning_rate(0, TrainConfig(lr=1e-3, warmup=0.0)) == 1e-3


def test_a_run_that_is_all_warmup_ends_at_the_peak_and_then_falls() -> None:
    config = TrainConfig(tokens=100, lr=1.0, warmup=1.0, min_lr_ratio=0.5)
    assert [learning_rate(tokens, config) for tokens in (50, 99, 100)] == [0.5, 0.99, 0.5]


def test_steps_of_an_interval_fill_it() -> None:
    config = TrainConfig(sync_every=4, batch_size=2, seq_len=8, procs_per_replica=3)
    assert config.tokens_per_sync == 192
    assert [tokens_within_sync(1000, step, 2, config) for step in (1, 2, 3, 4)] == [1096, 1192, 1288, 1384]


def test_the_rate_depends_on_tokens_not_on_who_made_them() -> None:
    config = TrainConfig(sync_every=2, batch_size=1, seq_len=64)
    few = tokens_within_sync(6 * config.tokens_per_sync, 2, 2, config)
    many = tokens_within_sync(4 * config.tokens_per_sync, 2, 4, config)
    assert learning_rate(few, config) == learning_rate(many, config)
