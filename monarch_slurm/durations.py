"""Lengths of time as people write them: ``30s``, ``1h 30m``, ``500ms``."""

from __future__ import annotations

import re
from fractions import Fraction

_NANOSECONDS = {
    **dict.fromkeys(("ns", "nsec"), 1),
    **dict.fromkeys(("us", "usec"), 10**3),
    **dict.fromkeys(("ms", "msec"), 10**6),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 10**9),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60 * 10**9),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600 * 10**9),
    **dict.fromkeys(("d", "day", "days"), 86400 * 10**9),
    **dict.fromkeys(("w", "week", "weeks"), 7 * 86400 * 10**9),
}
_PART = re.compile(r"\s*(\d+)\s*([a-z]+)", re.ASCII)


def parse_duration(text: str) -> float:
    """Return the seconds of a text such as ``1h 30m``; ``0`` may stand without a unit.

    Raises:
        ValueError: the text is no duration.
    """
    if text.strip() == "0":
        return 0.0
    total, at = 0, 0
    while match := _PART.match(text, at):
        if match[2] not in _NANOSECONDS:
            raise ValueError(f"Invalid duration format {text!r}: there is no unit {match[2]!r}")
        total += int(match[1]) * _NANOSECONDS[match[2]]
        at = match.end()
    if at == 0 or text[at:].strip():
        raise ValueError(f"Invalid duration format {text!r}: expected a text such as 30s, 5m, 1h 30m or 500ms")
    return total / 10**9


def format_duration(seconds: float) -> str:
    """Return ``seconds`` as text, in whole nanoseconds: 90 is ``1m 30s``."""
    left = round(Fraction(seconds) * 10**9)  # a float times 10**9 is off by some, for years
    days, left = divmod(left, _NANOSECONDS["d"])
    parts = [f"{days}day{'s' if days > 1 else ''}"] if days else []
    for unit in ("h", "m", "s", "ms", "us", "ns"):
        count, left = divmod(left, _NANOSECONDS[unit])
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts) or "0s"
