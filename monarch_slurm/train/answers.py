"""What a training run answers when it is asked from outside: how it stands, and its events for a second live view."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from monarch_slurm.train.config import TrainConfig
from monarch_slurm.train.live_state import RunState
from monarch_slurm.train.manager import Run

TRAINING, EVENTS = "training", "training_events"
"""The names of the questions."""

MOST_EVENTS = 5000
"""Events that are looked through for one answer."""

_FREQUENT = ("step", "phase")


def answers_of(run: Run, folder: Path, config: TrainConfig, state: RunState) -> dict[str, Callable[..., Any]]:
    """Return what ``run`` answers, by the name of the question."""

    def training() -> dict[str, Any]:
        return {
            "run": folder.name,
            "folder": str(folder),
            "config": config.to_dict(),
            "events": len(run.events),
            "step": state.step,
            "tokens": state.tokens,
            "tokens_per_second": state.tokens_per_second(),
            "train_loss": state.train_loss,
            "validation_loss": state.eval_loss,
            "participants": state.participants,
            "failures": state.failures,
            "recoveries": state.recoveries,
            "replicas": dict(Counter(replica.state for replica in list(state.replicas.values()))),
            "finished": state.ok,
        }

    def training_events(since: int, brief: bool) -> dict[str, Any]:
        # A list that only grows: a slice of it is the same whenever it is asked for.
        part = run.events[since : since + MOST_EVENTS]
        shown = [item for item in part if item.get("kind") not in _FREQUENT] if brief else part
        return {"run": folder.name, "next": since + len(part), "events": shown}

    return {TRAINING: training, EVENTS: training_events}
