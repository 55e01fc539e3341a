"""Numbers as people read them, shared by the live view and the report: seconds, counts, clock times."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

from monarch_slurm.train.quorum_state import EPOCH_SHIFT

MISSING = "\u2013"
"""Stands for a number that is not known."""


def number(value: Any) -> float | None:
    """Return ``value`` as a finite float, or None when it is not one; events come from processes that were dying."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


def index(value: Any, default: int | None = None) -> int | None:
    """Return ``value`` if it is a plain int, such as a replica or a rank, else ``default``."""
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def seconds(value: float | None) -> str:
    """Return a duration with the digits that matter: ``0.03 s``, ``12.3 s``, ``3 min 05 s``, ``2 h 07 min``."""
    if value is None:
        return MISSING
    if value < 0:
        return f"-{seconds(-value)}"
    if value < 9.995:
        return f"{value:.2f} s"
    if value < 99.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(value / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def bare_seconds(value: float | None) -> str:
    """Return seconds without the unit, for a column whose head names it."""
    if value is None:
        return MISSING
    return f"{value:.2f}" if abs(value) < 99.995 else f"{value:.0f}"


def count(value: float | None) -> str:
    """Return a count in three digits or so: ``950``, ``45.1k``, ``2.00M``, ``1.30B``."""
    if value is None:
        return MISSING
    for limit, factor, suffix in ((999.5, 1.0, ""), (999.5e3, 1e3, "k"), (999.5e6, 1e6, "M"), (math.inf, 1e9, "B")):
        if abs(value) < limit:
            scaled = value / factor
            if not suffix:
                return f"{scaled:.0f}"
            digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
            return f"{scaled:.{digits}f}{suffix}"
    return str(value)


def tick_label(value: float) -> str:
    """Return a round number as an axis shows it: ``0``, ``0.5M``, ``20k``, ``2.5``."""
    for factor, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor * 0.999999:
            return f"{value / factor:.6g}{suffix}"
    return f"{value:.6g}"


def percent(fraction: float | None, digits: int = 1) -> str:
    """Return a fraction as ``98.5 %``."""
    return MISSING if fraction is None else f"{100 * fraction:.{digits}f} %"


def elapsed(value: float) -> str:
    """Return seconds since the start as ``m:ss`` or ``h:mm:ss``."""
    whole = max(0, int(value))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def clock(t: float) -> str:
    """Return the local wall-clock time of ``t`` (seconds since the epoch) as ``HH:MM:SS``."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(t))
    except (OverflowError, ValueError, OSError):
        return "--:--:--"


def one_line(value: Any, limit: int = 200) -> str:
    """Return text for one line: blanks collapsed, control characters (terminal escapes) dropped, cut at ``limit``."""
    if value is None:
        return ""
    words = " ".join(str(value)[: 8 * limit].split())
    text = "".join(c for c in words if c.isprintable())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most ``most`` round numbers (steps of 1, 2 or 5 times a power of ten) from ``low`` to ``high``."""
    if not high > low or most < 2:
        return [low]
    exponent = math.floor(math.log10((high - low) / most))
    for step in (factor * 10.0**power for power in (exponent, exponent + 1, exponent + 2) for factor in (1, 2, 5)):
        found = list(_multiples(low, high, step))
        if len(found) <= most:
            return found
    return [low]


def time_ticks(high: float, most: int) -> tuple[list[float], float, str]:
    """Return round times from 0 to ``high`` seconds, the length of the axis' unit in seconds, and the unit's name."""
    unit, name = (1.0, "s") if high < 180 else (60.0, "min") if high < 3 * 3600 else (3600.0, "h")
    steps = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400]
    for step in steps:
        if high / step + 1 <= most:
            return list(_multiples(0.0, high, step)), unit, name
    return ticks(0.0, high, most), unit, name


def _multiples(low: float, high: float, step: float) -> Iterator[float]:
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    for i in range(first, last + 1):
        yield round(i * step, 12)


def quorum(number: int) -> str:
    """Return the id of a quorum for people: ``7``, or ``2.7`` if two actors had formed quorums before."""
    epoch, count = number >> EPOCH_SHIFT, number & ((1 << EPOCH_SHIFT) - 1)
    return f"{epoch}.{count}" if epoch else f"{count}"
