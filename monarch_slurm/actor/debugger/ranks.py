"""Which ranks a command of the debugger means: ``ranks(0,3)``, ``ranks(0:8:2)``, ``ranks(host=1, gpu=(0,2))``. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Wanted = Callable[[int, Mapping[str, int]], bool]
"""Whether a rank with these coordinates is meant."""


class RanksError(ValueError):
    """Not a selection of ranks; the text says what is expected."""


def parse_cast(text: str) -> tuple[str, Wanted, str]:
    """Return actor, ranks and command of ``ACTOR ranks(...) COMMAND``.

    Raises:
        RanksError: it has another form.
    """
    actor, _, rest = text.strip().partition(" ")
    rest = rest.strip()
    depth = length = 0
    for character in rest:
        length += 1
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == ")" and depth == 0:
            break
    command = rest[length:].strip()
    if not rest.startswith("ranks(") or depth or not command:
        raise RanksError("cast ACTOR ranks(...) COMMAND expected, such as: cast trainer ranks(0:8) p loss")
    return actor, parse_ranks(rest[len("ranks(") : length - 1]), command


def parse_ranks(text: str) -> Wanted:
    """Return what is meant by the text between the parentheses of ``ranks(...)``.

    Raises:
        RanksError: it has no meaning.
    """
    parts = _split(text)
    if not parts:
        raise RanksError("ranks() names no rank; ranks(:) are all")
    if not any("=" in part for part in parts):
        tests = [_parse_value(part) for part in parts]
        return lambda rank, _: any(test(rank) for test in tests)
    if not all("=" in part for part in parts):
        raise RanksError(f"ranks({text}): either ranks or dimensions")
    named = [(label.strip(), _parse_value(value)) for label, _, value in (part.partition("=") for part in parts)]

    def wanted(_: int, coords: Mapping[str, int]) -> bool:
        for label, _test in named:
            if label not in coords:
                raise RanksError(f"there is no dimension {label!r}; there are: {', '.join(coords) or 'none'}")
        return all(test(coords[label]) for label, test in named)

    return wanted


def _split(text: str) -> list[str]:
    """Split at commas outside of parentheses."""
    parts = [""]
    depth = 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _parse_value(text: str) -> Callable[[int], bool]:
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        tests = [_parse_value(part) for part in _split(text[1:-1])]
        return lambda value: any(test(value) for test in tests)
    try:
        if ":" not in text:
            only = _number(text)
            return lambda value: value == only
        numbers = [_number(part) if part.strip() else None for part in text.split(":")]
    except ValueError:
        raise RanksError(f"{text!r} is no rank and no range such as 0:8:2") from None
    if len(numbers) > 3 or (len(numbers) == 3 and numbers[2] == 0):
        raise RanksError(f"{text!r} is no range such as 0:8:2")
    start, stop, step = [*numbers, None][:3]
    first, by = start or 0, step or 1
    return lambda value: value >= first and (stop is None or value < stop) and (value - first) % by == 0


def _number(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number
