"""Lines of many ranks that say the same, as one. Pure: lines in, lines out."""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, field

STDOUT, STDERR = 1, 2

_NUMBER = re.compile(r"0[xX][0-9a-fA-F]+|\d+(?:[.,:]\d+)*(?:[eE][+-]?\d+)?")


@dataclass
class _Group:
    stream: int
    first: str
    prefix: str
    ranks: set[Hashable] = field(default_factory=set)
    count: int = 1

    @property
    def text(self) -> str:
        many = f"[{self.count} similar log lines] "
        return (many if self.count > 1 else self.prefix) + self.first


class SimilarLines:
    """Collects lines until `take_all`.

    Lines with the same text are one, also of the same rank. Lines that differ in their numbers only are one if they
    come from different ranks: what one rank says step after step stays apart. The first of them is shown.
    """

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        self._equal: dict[tuple[int, str], _Group] = {}
        self._similar: dict[tuple[int, str], list[_Group]] = {}
        self.bytes = 0
        """Length of the lines that are kept."""

    def add(self, rank: Hashable, stream: int, text: str, prefix: str) -> None:
        """Add a line.

        Args:
            rank: who said it.
            prefix: who that is for a person, if nobody else says it, too.
        """
        group = self._equal.get((stream, text))
        if group is None:
            alike = self._similar.setdefault((stream, _NUMBER.sub("#", text)), [])
            group = next((other for other in alike if rank not in other.ranks), None)
            if group is None:
                group = _Group(stream, text, prefix, {rank})
                self._groups.append(group)
                self._equal[stream, text] = group
                alike.append(group)
                self.bytes += len(text)
                return
        group.ranks.add(rank)
        group.count += 1

    def take_all(self) -> list[tuple[int, str]]:
        """Return stream and text of what to print, and begin anew."""
        groups, self._groups = self._groups, []
        self._equal.clear()
        self._similar.clear()
        self.bytes = 0
        return [(group.stream, group.text) for group in groups]
