"""Answers that this process waits for, and what makes waiting for them pointless."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from monarch_slurm.actor.errors import ActorRestartedError, SupervisionError
from monarch_slurm.actor.layout import ActorRef
from monarch_slurm.wire import AGENT, Address
from monarch_slurm.wire.pickling import Buffer

VALUE, EXCEPTION = "value", "exception"

Source = tuple[Address, ActorRef | None]
"""Where an answer comes from: a process, and the actor mesh there (None: the process itself)."""

Why = Callable[[Address, ActorRef | None], str]
"""Words the reason why an answer cannot come."""


class Restarted(str):
    """A reason why an answer cannot come that is no reason against another question: who was asked starts again."""

    __slots__ = ()


def lost_error(reason: str, endpoint: str | None = None) -> SupervisionError:
    """Return the error of a call whose answer cannot come."""
    kind = ActorRestartedError if isinstance(reason, Restarted) else SupervisionError
    return kind(reason, endpoint)


OnReply = Callable[[int, str, Sequence[Buffer]], None]
OnLost = Callable[[int, str], None]


@dataclass
class _Expected:
    """One port that waits for one answer from each of several actors."""

    on_reply: OnReply
    on_lost: OnLost
    waiting: dict[int, Source]
    """By rank of the answer."""
    durable: bool
    """The answer may come from a process that was started again."""
    keeper: Address | None
    """Who starts the processes again."""


class ReplyTable:
    """Ports of this process, by number. For any thread.

    There are two kinds: a reply port expects one answer per rank and vanishes after the last, or after the news that it
    cannot come; a channel port stays until it is closed.

    Args:
        incarnation: how often this process was started again. No two incarnations have a port of the same number, so
            that what was meant for an earlier one is dropped.
    """

    def __init__(self, incarnation: int = 0) -> None:
        self._numbers = itertools.count((incarnation << _INCARNATION_SHIFT) + 1)
        self._lock = threading.Lock()
        self._replies: dict[int, _Expected] = {}
        self._channels: dict[int, OnReply] = {}
        self._by_process: dict[str, set[int]] = {}

    def open_channel(self, on_reply: OnReply) -> int:
        """Return a new port; ``on_reply`` gets every message sent to it, until `close`."""
        number = next(self._numbers)
        with self._lock:
            self._channels[number] = on_reply
        return number

    def close(self, number: int) -> None:
        """Take no more messages on a channel port."""
        with self._lock:
            self._channels.pop(number, None)

    def expect(
        self,
        answers: dict[int, Source],
        on_reply: OnReply,
        on_lost: OnLost,
        durable: bool = False,
        keeper: Address | None = None,
    ) -> int:
        """Return a new port that waits for one answer per rank.

        Args:
            answers: for each rank, where its answer comes from.
            on_reply: called with rank, `VALUE` or `EXCEPTION`, and the frames.
            on_lost: called with rank and the reason when no answer can come any more.
            durable: an answer of a process that was started again will do.
            keeper: who starts the processes again; their host's end is then no end of theirs.
        """
        number = next(self._numbers)
        with self._lock:
            self._replies[number] = _Expected(on_reply, on_lost, dict(answers), durable, keeper)
            for process, _ in answers.values():
                self._by_process.setdefault(name_of(process), set()).add(number)
        return number

    def take(self, number: int, rank: int, status: str, frames: Sequence[Buffer]) -> bool:
        """Hand on an answer; False if nobody waits for it."""
        with self._lock:
            channel = self._channels.get(number)
            expected = None if channel else self._replies.get(number)
            if expected is not None:
                source = expected.waiting.pop(rank, None)
                if source is None:
                    return False
                self._tidy(number, expected, name_of(source[0]))
        if channel is not None:
            channel(rank, status, frames)
        elif expected is not None:
            expected.on_reply(rank, status, frames)
        return channel is not None or expected is not None

    def forget(self, number: int) -> None:
        """Wait no longer for the answers to a reply port."""
        with self._lock:
            expected = self._replies.get(number)
            if expected is not None:
                waiting, expected.waiting = expected.waiting, {}
                for process, _ in waiting.values():
                    self._tidy(number, expected, name_of(process))

    def lose(self, processes: Iterable[Address], why: Why, mesh: str | None = None, restarted: bool = False) -> None:
        """Give up answers of processes that ended, or of one actor mesh in them.

        Args:
            restarted: the processes start again, so what is durable is still waited for.
        """
        lost: list[tuple[OnLost, int, str]] = []
        with self._lock:
            for name in map(name_of, processes):
                for number in list(self._by_process.get(name, ())):
                    expected = self._replies[number]
                    if restarted and expected.durable:
                        continue
                    for rank, (source, ref) in list(expected.waiting.items()):
                        if name_of(source) == name and (mesh is None or (ref is not None and ref.mesh == mesh)):
                            del expected.waiting[rank]
                            reason = why(source, ref)
                            lost.append((expected.on_lost, rank, Restarted(reason) if restarted else reason))
                    self._tidy(number, expected, name)
        for on_lost, rank, reason in lost:
            on_lost(rank, reason)

    def processes(self, gone: Callable[[Address], bool]) -> list[Address]:
        """Return the processes that answers are expected from and that end with what is ``gone``: themselves, or who
        keeps them.
        """
        with self._lock:
            return [
                process
                for expected in self._replies.values()
                for process, _ in expected.waiting.values()
                if gone(expected.keeper or process)
            ]

    def _tidy(self, number: int, expected: _Expected, name: str) -> None:
        if not any(name_of(source) == name for source, _ in expected.waiting.values()):
            numbers = self._by_process.get(name)
            if numbers is not None:
                numbers.discard(number)
                if not numbers:
                    del self._by_process[name]
        if not expected.waiting:
            self._replies.pop(number, None)


def name_of(process: Address) -> str:
    """Return what names a process wherever it is: a proc that is started again may be on another host."""
    return str(process) if process.proc == AGENT else process.proc


_INCARNATION_SHIFT = 40


class CountDown:
    """Calls ``on_zero`` once it was itself called ``count`` times. For any thread."""

    def __init__(self, count: int, on_zero: Callable[[], None]) -> None:
        self._left = count
        self._on_zero = on_zero
        self._lock = threading.Lock()
        if count == 0:
            on_zero()

    def __call__(self, *_: object) -> None:
        """Count one down."""
        with self._lock:
            self._left -= 1
            at_zero = self._left == 0
        if at_zero:
            self._on_zero()
