"""Failures on purpose: a seeded schedule of them, and the actor that makes them happen inside a trainer's process."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from monarch_slurm.actor import Actor, endpoint
from monarch_slurm.errors import ConfigError

KINDS = ("kill", "segfault", "exception", "hang")
"""``kill``: SIGKILL. ``segfault``: a read of address 0 in native code. ``exception``: a Python exception in the
training loop. ``hang``: native code that never returns and never releases the GIL, so that heartbeats of native threads
go on."""

_HANG_SECONDS = 24 * 3600


class InjectedFailureError(RuntimeError):
    """The exception of an injected ``exception`` failure."""


_raise_in_training = threading.Event()


def check_injected() -> None:
    """Raise in the training loop if an ``exception`` failure was injected into this process.

    Raises:
        InjectedFailureError: it was.
    """
    if _raise_in_training.is_set():
        _raise_in_training.clear()
        raise InjectedFailureError("injected failure of kind 'exception'")


class FailureActor(Actor):
    """Runs beside a trainer, in the same process, and breaks it when told to."""

    @endpoint
    def inject(self, kind: str) -> None:
        """Make a failure of ``kind`` happen in this process (see `KINDS`)."""
        self.logger.warning("injecting failure %r into pid %d", kind, os.getpid())
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "segfault":
            ctypes.string_at(0)
        elif kind == "hang":
            ctypes.PyDLL(None).sleep(_HANG_SECONDS)  # a PyDLL call keeps the GIL
        elif kind == "exception":
            _raise_in_training.set()
        else:
            raise ValueError(f"unknown kind of failure {kind!r}")


@dataclass(frozen=True)
class Injection:
    """One failure of a schedule: when (seconds after training began), of which kind, in which replica and rank."""

    at: float
    kind: str
    replica: int
    rank: int


def parse_kinds(text: str) -> tuple[str, ...]:
    """Return the kinds in a comma-separated list.

    Raises:
        ConfigError: one is unknown, or there is none.
    """
    kinds = tuple(kind.strip() for kind in text.split(",") if kind.strip())
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise ConfigError(f"unknown kind of failure {', '.join(unknown) or text!r}; there are: {', '.join(KINDS)}")
    return kinds


def schedule(
    every: float, kinds: Sequence[str], replicas: int, ranks: int, seed: int, first: float | None = None
) -> Iterator[Injection]:
    """Yield failures ``every`` so many seconds without end; kinds take turns, replica and rank are drawn from ``seed``.

    Args:
        first: seconds until the first one; None is ``every``.
    """
    draw = random.Random(seed)  # noqa: S311 - a schedule, no secret
    at = every if first is None else first
    number = 0
    while True:
        yield Injection(at, kinds[number % len(kinds)], draw.randrange(replicas), draw.randrange(ranks))
        number += 1
        at += every
