"""Which part of a value does not pickle: pickle says what it met, not where."""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import cloudpickle

_MAX_DEPTH = 20
_MAX_CHILDREN = 1000


def explain(error: Exception, parts: Mapping[str, Any], where: str) -> None:
    """Add to ``error``, which pickling has raised, which part of ``parts`` does not pickle.

    The text of pickle's own errors is lengthened; those that a user's class has raised get a note (Python 3.11).

    Args:
        parts: what was pickled, by name.
        where: what the parts are, such as ``"an argument of log.add()"``.
    """
    path = _find(parts)
    if path is None:
        return
    text = f"{path}, {where}"
    if type(error) in (TypeError, AttributeError, pickle.PicklingError) and len(error.args) == 1:
        error.args = (f"{error.args[0]} ({text})",)
    elif hasattr(error, "add_note"):
        error.add_note(f"It was raised while {text}, was pickled.")


def _find(parts: Mapping[str, Any]) -> str | None:
    for name, value in parts.items():
        if not _pickles(value):
            return name + _descend(value)
    return None


def _descend(value: Any) -> str:
    path = ""
    for _ in range(_MAX_DEPTH):
        for suffix, child in itertools.islice(_children(value), _MAX_CHILDREN):
            if not _pickles(child):
                path, value = path + suffix, child
                break
        else:
            return path
    return path


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in list(value.items()))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{number}]", item) for number, item in enumerate(list(value)))
    yield from ((f".{name}", item) for name, item in list(getattr(value, "__dict__", {}).items()))


class _Nowhere(io.RawIOBase):
    def write(self, data: Any) -> int:
        return len(data)


def _pickles(value: Any) -> bool:
    try:
        cloudpickle.Pickler(_Nowhere(), protocol=5, buffer_callback=lambda _: None).dump(value)
    except Exception:  # whatever a class raises when it is pickled
        return False
    return True
