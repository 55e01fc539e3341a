"""Which replica saves the run's state, and when that is done. Pure: events and times in, orders out."""

from __future__ import annotations

import math
from collections.abc import Sequence

from monarch_slurm.train.events import Event
from monarch_slurm.train.saved import SavedState

PATIENCE = 30.0
"""Seconds that a replica may take to save before another one is asked, too."""


class Saving:
    """The saves of a run: which replica is asked for one, and which states are whole.

    Args:
        folder: of the run.
        ranks: ranks of a replica.
        inputs: name and digest of what the run reads, see `SavedState`.
    """

    def __init__(self, folder: str, ranks: int, inputs: tuple[tuple[str, str], ...] = ()) -> None:
        self._folder = folder
        self._ranks = ranks
        self._inputs = inputs
        self._asked: dict[int, float] = {}
        self._files: dict[tuple[int, int], dict[int, tuple[str, int]]] = {}
        self._failed: set[tuple[int, int]] = set()

    def next_replica(self, training: Sequence[int], now: float) -> int | None:
        """Return the replica that is to be asked now, None for none: one at a time, as long as it trains and is quick.

        Args:
            training: replicas that hold the run's state, in the order in which they are preferred.
        """
        if any(replica in training and now - at < PATIENCE for replica, at in self._asked.items()):
            return None
        left = [replica for replica in training if replica not in self._asked]
        if not left:
            return None
        self._asked[left[0]] = now
        return left[0]

    def is_hopeless(self, training: Sequence[int], now: float) -> bool:
        """Return whether nobody who has been asked can still save, and nobody is left to ask."""
        return not any(replica not in self._asked or now - self._asked[replica] < 2 * PATIENCE for replica in training)

    def lost(self, replica: int) -> None:
        """The processes of ``replica`` have ended; new ones know nothing of the wish."""
        self._asked.pop(replica, None)
        self._files = {key: files for key, files in self._files.items() if key[0] != replica}
        self._failed = {key for key in self._failed if key[0] != replica}

    def forget_wishes(self) -> None:
        """Nobody is asked for a save any more."""
        self._asked.clear()

    def take(self, event: Event) -> SavedState | None:
        """Take in a ``saved`` event; return the state that is whole now, if one is.

        The ranks of a replica hear of the wish at slightly different times, perhaps on both sides of a sync. Each saves
        again after every sync until the run ends, so that there is a step that all have saved.
        """
        if "error" in event:
            if event["replica"] in self._asked:
                self._asked[event["replica"]] = -math.inf  # another replica may fare better: ask it now
            self._failed.add((event["replica"], event["step"]))
            return None
        replica, step = event["replica"], event["step"]
        if (replica, step) in self._failed:
            return None  # the other ranks remove their files
        found = self._files.setdefault((replica, step), {})
        found[event["rank"]] = (event["sha256"], event["bytes"])
        if len(found) < self._ranks:
            return None
        self._files = {key: files for key, files in self._files.items() if key[1] > step}
        hashes, sizes = zip(*(found[rank] for rank in range(self._ranks)), strict=True)
        return SavedState(self._folder, step, replica, hashes, sizes, self._inputs)
