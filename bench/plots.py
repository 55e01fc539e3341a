"""Plots of the benches: one SVG file that any browser opens, from the rows that the tables are made of."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path

OURS, THEIRS, INK, GRID = "#1f6feb", "#9aa4af", "#24292f", "#d8dee4"
_LEFT, _WIDTH, _ROW = 250, 420, 44


def bars(path: Path, title: str, unit: str, rows: Sequence[tuple[str, float, str, float]]) -> None:
    """Write horizontal bars in pairs.

    Args:
        title: of the plot.
        unit: of the values.
        rows: of each pair what is measured, our value, what it is compared with, and its value.
    """
    top = max(max(ours, theirs) for _, ours, _, theirs in rows)
    parts = []
    for index, (name, ours, against, theirs) in enumerate(rows):
        y = 40 + index * _ROW
        for label, value, color, at in ((name, ours, OURS, y), (against, theirs, THEIRS, y + 17)):
            width = _WIDTH * value / top
            parts.append(f'<rect x="{_LEFT}" y="{at}" width="{width:.1f}" height="14" fill="{color}"/>')
            parts.append(_text(_LEFT - 8, at + 11, label, "end"))
            parts.append(_text(_LEFT + width + 6, at + 11, f"{value:.3g} {unit}"))
    _write(path, title, 40 + len(rows) * _ROW, parts)


def lines(path: Path, title: str, sizes: Sequence[int], curves: Sequence[tuple[str, str, Sequence[float]]]) -> None:
    """Write curves over sizes, both axes logarithmic.

    Args:
        title: of the plot, with the unit of the values.
        sizes: bytes.
        curves: of each its name, its color and a value for each size, more than 0.
    """
    values = [value for _, _, of in curves for value in of]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    first, last = math.log2(min(sizes)), math.log2(max(sizes))

    def x(size: float) -> float:
        return 70 + (math.log2(size) - first) / max(1.0, last - first) * 560

    def y(value: float) -> float:
        return 320 - (math.log10(value) - low) / (high - low) * 270

    parts = []
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(f'<path d="M70 {at:.1f}H630" stroke="{GRID}"/>')
        parts.append(_text(62, at + 4, f"{10.0**power:g}", "end"))
    for size in sizes:
        parts.append(_text(x(size), 340, size_text(size), "middle"))
    for index, (name, color, of) in enumerate(curves):
        points = " ".join(f"{x(size):.1f},{y(value):.1f}" for size, value in zip(sizes, of, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<rect x="{90 + 150 * index}" y="356" width="14" height="4" fill="{color}"/>')
        parts.append(_text(110 + 150 * index, 362, name))
    _write(path, title, 376, parts)


def size_text(size: int) -> str:
    """Return ``4 KiB`` for 4096."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return f"{size / (1 << power):g} {unit}"
    return f"{size} B"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{INK}">{html.escape(text)}</text>'


def _write(path: Path, title: str, height: float, parts: Sequence[str]) -> None:
    style = 'font-family="system-ui, sans-serif" font-size="11"'
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height:.0f}" {style}>\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n'
        f'<text x="12" y="22" font-size="14" fill="{INK}">{html.escape(title)}</text>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )
