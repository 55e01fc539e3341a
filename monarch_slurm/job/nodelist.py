"""Slurm's compressed lists: node names such as ``rack[1-2]n[01-03],login`` and counts such as ``2(x3),1``.

The grammar and the order of the expansion are those of ``scontrol show hostnames``, with two differences. A name may
go on after its last bracket (``node[1-2]-ib``), as interfaces' names do. And what scontrol silently mangles
(``n[1-2``, ``n[3-]``) is an error here.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator

from monarch_slurm.job.errors import NodeListError

MAX_HOSTS = 65_536
"""Names that one list may expand to: Slurm's own limit for one range."""

_SEPARATORS = ", \t\n"
_RANGE = re.compile(r"([0-9]{1,64})(?:-([0-9]{1,64}))?")
_REPEATED = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
_NUMBERED = re.compile(r"(.*?)([0-9]{1,64})", re.DOTALL)


def expand(text: str) -> list[str]:
    """Return the names in ``text``, in order, with zero padding and repeats kept.

    The position of a name need not be its node's ``SLURM_NODEID``.

    Raises:
        NodeListError: ``text`` is no node list, or stands for more than `MAX_HOSTS` names.
    """
    names: list[str] = []
    position = 0
    while position < len(text):
        if text[position] in _SEPARATORS:
            position += 1
            continue
        start = position
        literals, groups, position = _name(text, position)
        if len(names) + math.prod(len(group) for group in groups) > MAX_HOSTS:
            raise NodeListError(text, start, f"more than {MAX_HOSTS} names")
        names += _product(literals, groups)
    return names


def _name(text: str, position: int) -> tuple[list[str], list[list[str]], int]:
    """Read one name; return the texts around its brackets, the brackets' numbers, and where it ends."""
    literals = [""]
    groups: list[list[str]] = []
    while position < len(text) and text[position] not in _SEPARATORS:
        if text[position] == "[":
            group, position = _bracket(text, position)
            groups.append(group)
            literals.append("")
        elif text[position] == "]":
            raise NodeListError(text, position, "a ']' without its '['")
        else:
            literals[-1] += text[position]
            position += 1
    return literals, groups, position


def _bracket(text: str, start: int) -> tuple[list[str], int]:
    """Read the bracket at ``start``; return its numbers and the position after it."""
    numbers: list[str] = []
    position = start + 1
    while True:
        match = _RANGE.match(text, position)
        if match is None:
            raise NodeListError(text, min(position, len(text)), "a number expected")
        first, last = match.group(1), match.group(2) or match.group(1)
        size = int(last) - int(first) + 1
        if size < 1:
            raise NodeListError(text, position, "a range that runs backwards")
        if len(numbers) + size > MAX_HOSTS:
            raise NodeListError(text, position, f"more than {MAX_HOSTS} names")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
        position = match.end()
        if position >= len(text):
            raise NodeListError(text, start, "a '[' without its ']'")
        if text[position] == "]":
            return numbers, position + 1
        if text[position] != ",":
            raise NodeListError(text, position, "',' or ']' expected")
        position += 1


def _product(literals: list[str], groups: list[list[str]]) -> Iterator[str]:
    """Yield the names in scontrol's order: the last bracket runs fastest, then the others from the left."""
    if not groups:
        yield literals[0]
        return
    *leading, last = groups
    for reversed_choice in itertools.product(*reversed(leading)):
        prefix = "".join(itertools.chain(*zip(literals, reversed(reversed_choice), strict=False)))
        for number in last:
            yield f"{prefix}{literals[-2]}{number}{literals[-1]}"


def compress(names: Iterable[str]) -> str:
    """Return the list that `expand` turns into ``names`` again, in scontrol's compressed form.

    Only the last number of a name is compressed, and only between neighbours in the list.
    """
    parts: list[str] = []
    for prefix, run in itertools.groupby(names, key=_prefix):
        members = list(run)
        if prefix is None:
            parts += members
        elif len(members) == 1:
            parts.append(members[0])
        else:
            parts.append(f"{prefix}[{','.join(_ranges([name[len(prefix) :] for name in members]))}]")
    return ",".join(parts)


def _prefix(name: str) -> str | None:
    match = _NUMBERED.fullmatch(name)
    return None if match is None else match.group(1)


def _ranges(numbers: list[str]) -> Iterator[str]:
    first = last = numbers[0]
    for number in numbers[1:]:
        if number == str(int(last) + 1).zfill(len(first)):
            last = number
            continue
        yield first if first == last else f"{first}-{last}"
        first = last = number
    yield first if first == last else f"{first}-{last}"


def tasks_per_node(text: str) -> list[int]:
    """Return the count of each node in a list such as ``2(x3),1`` (``SLURM_TASKS_PER_NODE``): here ``[2, 2, 2, 1]``.

    Raises:
        NodeListError: ``text`` is no such list, or is longer than `MAX_HOSTS`.
    """
    counts: list[int] = []
    position = 0
    while True:
        match = _REPEATED.match(text, position)
        if match is None:
            raise NodeListError(text, position, "a count expected")
        repeats = int(match.group(2) or 1)
        if len(counts) + repeats > MAX_HOSTS:
            raise NodeListError(text, position, f"more than {MAX_HOSTS} nodes")
        counts += [int(match.group(1))] * repeats
        position = match.end()
        if position == len(text):
            return counts
        if text[position] != ",":
            raise NodeListError(text, position, "',' expected")
        position += 1
