"""Facts as short lines: srun mixes the outputs of tasks, but leaves lines of less than a kilobyte whole."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

from monarch_slurm.health.facts import Facts

_MARK = "monarch_slurm.health"
_PIECE = 400


def lines_of(facts: Facts) -> Iterator[str]:
    """Return the lines that stand for ``facts``, without their ends."""
    text = json.dumps(facts)
    name = secrets.token_hex(8)
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    for index, piece in enumerate(pieces):
        yield json.dumps([_MARK, name, index, len(pieces), piece])


class Pieces:
    """Puts lines of several hosts, mixed with each other and with what else is printed, together again."""

    def __init__(self) -> None:
        self._found: dict[str, dict[int, str]] = {}

    def add(self, line: str) -> Facts | None:
        """Take a line; return the facts that it makes complete."""
        try:
            said: Any = json.loads(line)
        except ValueError:
            return None  # a node's prologue prints, too
        if not isinstance(said, list) or said[:1] != [_MARK]:
            return None
        _, name, index, count, piece = said
        found = self._found.setdefault(name, {})
        found[index] = piece
        if len(found) < count:
            return None
        del self._found[name]
        facts: Facts = json.loads("".join(found[index] for index in range(count)))
        return facts
