"""An actor that counts, for tests of what becomes of actors."""

from __future__ import annotations

import os

from monarch_slurm.actor import Actor, current_rank, endpoint


class Counter(Actor):
    """Counts from what it was given; what it counted is lost with it."""

    def __init__(self, start: int = 0) -> None:
        self.value = start

    @endpoint
    def add(self, n: int) -> int:
        self.value += n
        return self.value

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def rank(self) -> int:
        return current_rank().rank
