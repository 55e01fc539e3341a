"""Answers of many procs on their way to the controller, folded into few messages as they go up the tree of agents.

What an agent has for the controller at the end of a round of its loop becomes one *entry*: small answers of its procs,
and the ends of those that were told to end. (That of one that fails does not wait for any agent on the way.)
Agents above add the entries that come to them to their own, so nobody waits for anybody. As on the way down (see
`cast_order`), nobody on the way is trusted: entries are numbered by their host, which keeps them until the controller
has acknowledged them, sends them again over its own connection when the way breaks, and puts barriers into what it
sends directly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgpack  # type: ignore[import-untyped]

from monarch_slurm.wire import CONTROLLER, Message, WireError, pack
from monarch_slurm.wire.bulk import in_place
from monarch_slurm.wire.large_buffers import Buffer

SMALL_BYTES = 4096
"""Answers above this size go over the host's own connection."""

Reply = tuple[int, int, str, list[bytes]]
"""Port, rank, status and frames of an answer."""


def is_foldable(message: Message) -> bool:
    """Return whether ``message`` is a small answer for the controller, or the expected end of a proc."""
    if message.dst != CONTROLLER:
        return False
    if message.kind == "port":
        return sum(map(len, message.body)) <= SMALL_BYTES
    fields = message.fields
    return message.kind == "proc_down" and fields["expected"] and sum(map(len, fields["stderr_tail"])) <= SMALL_BYTES


class Folder:
    """The entries of one host. No I/O.

    Args:
        host: its id.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._waiting: list[Reply] = []
        self._ends: list[dict[str, Any]] = []
        self._number = 0
        self._directs = 0
        self._barred = 0
        self._kept: deque[tuple[int, float, bytes]] = deque()

    def add(self, message: Message) -> bool:
        """Add an answer, or an end; return whether it is the first since `take`."""
        fields = message.fields
        if message.kind == "proc_down":
            self._ends.append(fields)
        else:
            frames = [bytes(in_place(frame)) for frame in message.body]
            self._waiting.append((fields["port"], fields["rank"], fields["status"], frames))
        return len(self._waiting) + len(self._ends) == 1

    def take(self, now: float) -> bytes:
        """Return the entry of what was added, which is kept; nothing if nothing was."""
        if not self._waiting and not self._ends:
            return b""
        self._number += 1
        entry = pack([self._host, self._number, self._directs, self._waiting, self._ends])
        self._waiting, self._ends = [], []
        self._kept.append((self._number, now, entry))
        return entry

    def direct(self) -> int:
        """Note that a message follows on the host's own connection, all that was added having been taken.

        Returns:
            The number of the barrier that goes before it; 0 for none.
        """
        self._directs += 1
        if self._barred == self._number:
            return 0
        self._barred = self._number
        return self._number

    def acknowledged(self, number: int) -> None:
        """The controller has everything up to the entry ``number``."""
        while self._kept and self._kept[0][0] <= number:
            self._kept.popleft()

    def kept_since(self) -> float | None:
        """Return when the oldest entry was made that has not been acknowledged."""
        return self._kept[0][1] if self._kept else None

    def kept(self) -> bytes:
        """Return all entries that have not been acknowledged."""
        return b"".join(entry for _, _, entry in self._kept)


def entries(body: Sequence[Buffer]) -> Iterator[tuple[str, int, int, list[Any], list[dict[str, Any]]]]:
    """Yield the entries in the body of a message: host, number, direct messages before it, answers, ends of procs.

    Raises:
        WireError: these are none.
    """
    for frame in body:
        unpacker = msgpack.Unpacker(max_buffer_size=0)
        unpacker.feed(in_place(frame))
        try:
            yield from unpacker
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise WireError(f"not folded answers: {error!r}") from None
