"""Answers that this process waits for, and what makes waiting for them pointless."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from monarch_slurm.actor.errors import ActorRestartedError, SupervisionError
from monarch_slurm.actor.layout import ActorRef, ProcLayout
from monarch_slurm.actor.ndslice import Slice
from monarch_slurm.wire import AGENT, Address
from monarch_slurm.wire.large_buffers import Buffer

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


class Listed:
    """Answers of processes that are told one by one.

    Args:
        answers: for each rank, where its answer comes from.
    """

    def __init__(self, answers: dict[int, Source]) -> None:
        self._waiting = dict(answers)
        self._ranks: dict[str, list[int]] = {}
        for rank, (process, _) in answers.items():
            self._ranks.setdefault(name_of(process), []).append(rank)
        self.keys = set(self._ranks)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def take(self, rank: int) -> bool:
        """Note an answer; False if none of that rank is waited for."""
        return self._waiting.pop(rank, None) is not None

    def lose(self, name: str, mesh: str | None) -> list[tuple[int, Source]]:
        """Wait no longer for the process ``name``, or one actor mesh in it; return what was waited for."""
        lost = []
        for rank in self._ranks.get(name, ()):
            source = self._waiting.get(rank)
            if source is not None and (mesh is None or (source[1] is not None and source[1].mesh == mesh)):
                del self._waiting[rank]
                lost.append((rank, source))
        return lost

    def processes(self, hosts: Collection[str]) -> list[Address]:
        """Return the processes that are waited for, all of them even if only those on ``hosts`` are asked for."""
        return [process for process, _ in self._waiting.values()]

    def sources(self) -> list[Source]:
        """Return where the answers come from that are waited for."""
        return list(self._waiting.values())


class OfMesh:
    """One answer of each proc in a slice of a proc mesh. What it costs to make does not depend on the procs' number.

    Args:
        ref: the actor mesh that answers; None if the procs themselves do.
        layout: where the procs are.
        ndslice: which of them.
    """

    def __init__(self, ref: ActorRef | None, layout: ProcLayout, ndslice: Slice) -> None:
        self._ref, self._layout, self._slice = ref, layout, ndslice
        self._waiting = set(range(len(ndslice)))
        self.keys = {layout.mesh}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def take(self, rank: int) -> bool:
        """Note an answer; False if none of that rank is waited for."""
        try:
            self._waiting.remove(rank)
        except KeyError:
            return False
        return True

    def lose(self, name: str, mesh: str | None) -> list[tuple[int, Source]]:
        """Wait no longer for the proc ``name``, or one actor mesh in it; return what was waited for."""
        proc_mesh, _, number = name.rpartition(".")
        if proc_mesh != self._layout.mesh or (mesh is not None and (self._ref is None or self._ref.mesh != mesh)):
            return []
        try:
            rank = self._slice.index(int(number))
        except ValueError:  # it is not in the slice
            return []
        return [(rank, (self._layout.address(int(number)), self._ref))] if self.take(rank) else []

    def processes(self, hosts: Collection[str]) -> list[Address]:
        """Return the procs that are waited for, on ``hosts`` if any are given."""
        if not hosts:
            return [self._layout.address(self._slice.get(rank)) for rank in self._waiting]
        there = []
        for base in self._layout.ranks_on(hosts):
            try:
                rank = self._slice.index(base)
            except ValueError:
                continue
            if rank in self._waiting:
                there.append(self._layout.address(base))
        return there

    def sources(self) -> list[Source]:
        """Return where the answers come from that are waited for."""
        return [(process, self._ref) for process in self.processes(())]


@dataclass
class _Expected:
    """One port that waits for one answer from each of several actors."""

    on_reply: OnReply
    on_lost: OnLost
    answers: Listed | OfMesh
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
        self._over: Why | None = None
        self._by_key: dict[str, set[int]] = {}
        """Ports by the processes, and the proc meshes, that answers are waited for from."""

    def open_channel(self, on_reply: OnReply) -> int:
        """Return a new port; ``on_reply`` gets every message sent to it, until `close`."""
        number = next(self._numbers)
        with self._lock:
            self._channels[number] = on_reply
        return number

    def close(self, number: int) -> None:
        """Take no more messages on a channel port."""
        # Without the lock: a receiver is collected in whatever a thread does, even in what it does with the lock.
        self._channels.pop(number, None)

    def expect(
        self,
        answers: dict[int, Source] | OfMesh,
        on_reply: OnReply,
        on_lost: OnLost,
        durable: bool = False,
        keeper: Address | None = None,
    ) -> int:
        """Return a new port that waits for one answer per rank.

        Args:
            answers: for each rank, where its answer comes from; or which procs of a mesh.
            on_reply: called with rank, `VALUE` or `EXCEPTION`, and the frames.
            on_lost: called with rank and the reason when no answer can come any more.
            durable: an answer of a process that was started again will do.
            keeper: who starts the processes again; their host's end is then no end of theirs.
        """
        number = next(self._numbers)
        waited_for = answers if isinstance(answers, OfMesh) else Listed(answers)
        with self._lock:
            # In this order: a signal handler may raise in between, and what is here without a key is never given up.
            for key in waited_for.keys:
                self._by_key.setdefault(key, set()).add(number)
            self._replies[number] = _Expected(on_reply, on_lost, waited_for, durable, keeper)
            over = self._over
        if over is not None:
            self.end(over)
        return number

    def end(self, why: Why) -> None:
        """Give up all answers, and from now on each that is asked for: nobody can be reached any more."""
        with self._lock:
            self._over = why
            processes = [process for expected in self._replies.values() for process in expected.answers.processes(())]
        self.lose(processes, why)

    def take(self, number: int, rank: int, status: str, frames: Sequence[Buffer]) -> bool:
        """Hand on an answer; False if nobody waits for it."""
        with self._lock:
            channel = self._channels.get(number)
            expected = None if channel else self._replies.get(number)
            if expected is not None:
                if not expected.answers.take(rank):
                    return False
                if not expected.answers:
                    self._close(number, expected)
        if channel is not None:
            channel(rank, status, frames)
        elif expected is not None:
            expected.on_reply(rank, status, frames)
        return channel is not None or expected is not None

    def take_many(self, replies: Iterable[tuple[int, int, str, Sequence[Buffer]]]) -> None:
        """Hand on answers, each with its port, rank, status and frames."""
        for number, rank, status, frames in replies:
            self.take(number, rank, status, frames)

    def forget(self, number: int) -> None:
        """Wait no longer for the answers to a reply port."""
        with self._lock:
            expected = self._replies.get(number)
            if expected is not None:
                self._close(number, expected)

    def sources(self, number: int) -> list[Source]:
        """Return where the answers come from that a reply port still waits for."""
        with self._lock:
            expected = self._replies.get(number)
            return expected.answers.sources() if expected is not None else []

    def lose(self, processes: Iterable[Address], why: Why, mesh: str | None = None, restarted: bool = False) -> None:
        """Give up answers of processes that ended, or of one actor mesh in them.

        Args:
            restarted: the processes start again, so what is durable is still waited for.
        """
        lost: list[tuple[OnLost, int, str]] = []
        with self._lock:
            for name in map(name_of, processes):
                for key in (name, name.rpartition(".")[0]):
                    for number in list(self._by_key.get(key, ())):
                        expected = self._replies.get(number)
                        if expected is None:
                            self._forget_key(key, number)
                            continue
                        if restarted and expected.durable:
                            continue
                        for rank, (source, ref) in expected.answers.lose(name, mesh):
                            reason = why(source, ref)
                            lost.append((expected.on_lost, rank, Restarted(reason) if restarted else reason))
                        if not expected.answers:
                            self._close(number, expected)
        for on_lost, rank, reason in lost:
            on_lost(rank, reason)

    def processes(self, gone: Callable[[Address], bool], hosts: Collection[str]) -> list[Address]:
        """Return the processes that answers are expected from and that end with what is ``gone``: themselves, or who
        keeps them.

        Args:
            hosts: ids of the host that is gone; empty for a single process, whose own answers were given up before.
        """
        with self._lock:
            found = []
            for expected in self._replies.values():
                if expected.keeper is not None:
                    found += expected.answers.processes(()) if gone(expected.keeper) else []
                elif hosts:
                    found += filter(gone, expected.answers.processes(hosts))
        return found

    def _close(self, number: int, expected: _Expected) -> None:
        del self._replies[number]
        for key in expected.answers.keys:
            self._forget_key(key, number)

    def _forget_key(self, key: str, number: int) -> None:
        numbers = self._by_key[key]
        numbers.discard(number)
        if not numbers:
            del self._by_key[key]


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

    @property
    def left(self) -> int:
        """How many calls are missing."""
        return self._left

    def __call__(self, *_: object) -> None:
        """Count one down."""
        with self._lock:
            self._left -= 1
            at_zero = self._left == 0
        if at_zero:
            self._on_zero()
