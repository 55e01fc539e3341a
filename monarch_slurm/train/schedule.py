"""The learning rate as a function of how far the whole run has come.

Progress is counted in tokens that all replicas together have committed, not in the steps of one trainer: a run that
lost a replica for a while, or threw a sync away, has the same learning rate for the same token as one that did not.
"""

from __future__ import annotations

import math

from monarch_slurm.train.config import TrainConfig


def learning_rate(tokens: float, config: TrainConfig) -> float:
    """Return the learning rate when the run has consumed ``tokens``: a linear warm-up, then a cosine.

    Args:
        tokens: tokens of the whole run so far; beyond the budget the rate stays at its end value.
        config: the peak, the end value, the budget and the part of it that is warm-up.

    Returns:
        From 0 at no tokens over ``config.lr`` at ``warmup * tokens`` to ``lr * min_lr_ratio`` at the budget.
    """
    progress = min(max(tokens / config.tokens, 0.0), 1.0)
    if progress < config.warmup:
        return config.lr * progress / config.warmup
    rest = 1.0 - config.warmup
    along = (progress - config.warmup) / rest if rest > 0 else 1.0
    low = config.lr * config.min_lr_ratio
    return low + 0.5 * (config.lr - low) * (1.0 + math.cos(math.pi * along))


def tokens_within_sync(committed: int, local_step: int, participants: int, config: TrainConfig) -> float:
    """Return the tokens of the whole run at the end of an inner step, assuming that the present sync is committed.

    Args:
        committed: tokens of all committed syncs.
        local_step: inner steps since the last sync, this one included, 1 to ``sync_every``.
        participants: replicas that took part in the last sync (before the first: all of them).
        config: the tokens of a sync.
    """
    return committed + config.tokens_per_sync * participants * local_step / config.sync_every
