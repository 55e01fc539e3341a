"""The charts of a report, as SVG that needs no script.

A chart is drawn in a box whose width is 100 % and whose height is a number of pixels: x is given in per cent and y in
pixels, so that on a page of any width text, marks and strokes keep their size and only the distances stretch. The same
fragments make the standalone picture, where the boxes have a fixed width.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from monarch_slurm.train import units
from monarch_slurm.train.curves import tokens_at

Report = dict[str, Any]
Points = Sequence[Sequence[float]]

TYPES = ("kill", "segfault", "exception", "hang", "host", "crash")
"""Failure types that have a colour and a shape of their own; others look like ``crash``."""

_SHAPES = {
    "kill": "M-5.5,-4.5H5.5L0,5.5Z",
    "segfault": "M0,-6L6,0L0,6L-6,0Z",
    "exception": "M-5,0A5,5 0 1 0 5,0A5,5 0 1 0 -5,0Z",
    "hang": "M-4.5,-4.5H4.5V4.5H-4.5Z",
    "host": "M-2,-6H2V-2H6V2H2V6H-2V2H-6V-2H-2Z",
    "crash": "M-5.5,4.5H5.5L0,-5.5Z",
}
_WIDTH = 1000.0  # of the stretched coordinate system of lines; any number would do
_HEADROOM = 24.0  # pixels above the data, where the failure marks are

HEIGHT = {"participants": 150, "loss": 220}


@dataclass(frozen=True)
class Scale:
    """A box: x from ``x0`` to ``x1`` over the width, y from ``y0`` (bottom) to ``y1`` (under the marks)."""

    x0: float
    x1: float
    y0: float
    y1: float
    height: float

    def x(self, value: float) -> float:
        """Return the share of the width, in per cent, held inside the box."""
        return 100 * min(1.0, max(0.0, (value - self.x0) / ((self.x1 - self.x0) or 1.0)))

    def y(self, value: float) -> float:
        """Return the pixels from the top."""
        share = (value - self.y0) / ((self.y1 - self.y0) or 1.0)
        return self.height - (self.height - _HEADROOM) * min(1.02, max(0.0, share))


def asset(name: str) -> str:
    """Return the text of a file in ``assets/``."""
    return (resources.files("monarch_slurm.train") / "assets" / name).read_text(encoding="utf-8")


def pairs(points: Any) -> list[list[float]]:
    """Return the points that have two numbers; a report may have been edited, or hold None in place of a NaN."""
    given = points if isinstance(points, (list, tuple)) else []
    known = [[units.number(v) for v in p] for p in given if isinstance(p, (list, tuple)) and len(p) == 2]
    return [[x, y] for x, y in known if x is not None and y is not None]


def type_class(kind: Any) -> str:
    """Return the failure type whose colour and shape stand for ``kind``."""
    return kind if kind in TYPES else "crash"


def symbol(kind: Any, size: int = 14) -> str:
    """Return the mark of a failure type as a small inline SVG, for legends and tables."""
    known = type_class(kind)
    return (
        f'<svg class="symbol t-{known}" width="{size}" height="{size}" viewBox="-7 -7 14 14" aria-hidden="true">'
        f'<path d="{_SHAPES[known]}"/></svg>'
    )


def participants_floor(report: Report) -> int:
    """Return where the axis of participants begins: at 0, unless one replica of a wide run would not be seen then."""
    sizes = [p[1] for p in _curve(report, "participants")]
    if not sizes or max(sizes) <= 16 or min(sizes) < 0.6 * max(sizes):
        return 0
    return max(0, int(min(sizes)) - 3)


def participants_chart(report: Report) -> str:
    """Return the box of participants over time: the quorum's size as a line, the replicas that train as an area."""
    duration = _duration(report)
    curve, training = _curve(report, "participants"), _curve(report, "training_replicas")
    most = max([p[1] for p in (*curve, *training)] + [float(len(report["replicas"])), 1.0])
    scale = Scale(0.0, duration, float(participants_floor(report)), most, HEIGHT["participants"])
    marks = [(float(f["start"]) - float(report["started"]), f) for f in report["failures"]]
    return "".join(
        (
            _y_axis(scale, [v for v in units.ticks(scale.y0, most, 6) if v == int(v)], "replicas"),
            _time_axis(scale),
            _stems(scale, marks),
            _lines(
                scale,
                _area(scale, training, duration),
                f'<path class="run" d="{_step_path(scale, curve, duration)}"/>' if curve else "",
            ),
            _marks(scale, marks),
        )
    )


def loss_chart(report: Report) -> str:
    """Return the box of loss over committed tokens: this run's validation and training loss, and the reference's."""
    run, train = _curve(report, "eval"), _curve(report, "train")
    reference = pairs((report.get("reference") or {}).get("eval"))
    if not (run or reference or train):
        return '<text class="nothing" x="50%" y="50%" text-anchor="middle">no loss was reported</text>'
    x1 = max(p[0] for p in (*run, *reference, *train)) or 1.0
    # The first steps of training lie far above what is compared, so validation alone decides the range if it can.
    losses = [p[1] for p in (*run, *reference)] or [p[1] for p in train]
    low, high = min(losses), max(losses)
    pad = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    scale = Scale(0.0, x1, low - pad, high + pad, HEIGHT["loss"])
    tokens = _curve(report, "tokens")
    marks = [(tokens_at(_tuples(tokens), float(f["start"]) - float(report["started"])), f) for f in report["failures"]]
    return "".join(
        (
            _y_axis(scale, units.ticks(scale.y0, scale.y1, 6), "loss"),
            _x_axis(scale, [(v, units.tick_label(v)) for v in units.ticks(0, x1, 9)], "tokens committed"),
            _stems(scale, marks),
            _lines(
                scale,
                # A broad pale line, drawn first: where the two runs agree both can be seen.
                f'<path class="ref" d="{_path(scale, reference)}"/>' if reference else "",
                f'<path class="train" d="{_path(scale, [p for p in train if p[1] <= scale.y1])}"/>' if train else "",
                f'<path class="run" d="{_path(scale, run)}"/>' if run else "",
            ),
            _marks(scale, marks),
        )
    )


def lanes_chart(report: Report) -> tuple[str, float]:
    """Return the box of what each replica did over time, one row for each, and its height in pixels."""
    replicas = report["replicas"]
    pitch = max(8.0, min(26.0, 520.0 / max(1, len(replicas))))
    every = 1 if pitch >= 14 else 4
    bar = pitch * 0.72
    height = pitch * max(1, len(replicas))
    scale = Scale(0.0, _duration(report), 0.0, 1.0, height)
    parts = [_time_axis(scale), '<text class="axis title" x="-36" y="-8">replica</text>']
    for row, replica in enumerate(replicas):
        top = row * pitch + (pitch - bar) / 2
        if row % every == 0:
            parts.append(
                f'<text class="axis" x="-9" y="{top + bar / 2 + 4:.1f}" text-anchor="end">{replica["replica"]}</text>'
            )
        for s in replica["lane"]:
            left, right = scale.x(s["start"]), scale.x(s["end"])
            hint = f"replica {replica['replica']}, generation {s['generation']}: {s['state']} {_span(s)}"
            parts.append(
                f'<rect class="s-{html.escape(str(s["state"]))}" x="{left:.3f}%" y="{top:.1f}" '
                f'width="{max(0.0, right - left):.3f}%" height="{bar:.1f}"><title>{html.escape(hint)}</title></rect>'
            )
    return "".join(parts), height


def bar_chart(failure: dict[str, Any], stages: Sequence[str], scale: Scale, grid: Sequence[float]) -> str:
    """Return the stacked bar of one failure: a segment up to each stage that it reached, in seconds since its start."""
    parts = [
        f'<line class="grid" x1="{scale.x(v):.3f}%" x2="{scale.x(v):.3f}%" y1="0" y2="{scale.height}"/>' for v in grid
    ]
    before = 0.0
    for stage in stages:
        value = units.number(failure["seconds"].get(stage))
        if value is None:
            continue
        left, right = scale.x(before), scale.x(value)
        hint = f"{stage.replace('_', ' ')} after {units.seconds(value)}"
        parts.append(
            f'<rect class="g-{stage}" x="{left:.3f}%" y="3" width="{max(0.0, right - left):.3f}%" '
            f'height="{scale.height - 6}"><title>{hint}</title></rect>'
        )
        before = max(before, value)
    if failure["outcome"] != "recovered":
        text = html.escape(str(failure["outcome"]))
        at = scale.x(before)
        side = 'dx="-6" text-anchor="end"' if at > 70 else 'dx="6"'
        parts.append(f'<text class="outcome" x="{at:.3f}%" y="{scale.height / 2 + 4:.1f}" {side}>{text}</text>')
    return "".join(parts)


def plot_svg(report: Report) -> str:
    """Return participants and loss as one standalone SVG, for a README or a slide; it follows light and dark."""
    width, left, inner = 960, 60, 870
    legend = "".join(_svg_legend(report, left + inner))
    title = f"{units.count(units.number(report['summary'].get('tokens')))} tokens, {len(report['failures'])} failures"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 578" width="{width}" height="578" role="img" '
        f'aria-label="Participants and loss of a run: {title}"><style>{asset("chart.css")}</style>'
        f'<rect class="paper" width="{width}" height="578" rx="8"/>'
        f'<text class="heading" x="24" y="34">Participants over time</text>'
        f'<svg x="{left}" y="62" width="{inner}" height="{HEIGHT["participants"]}" overflow="visible">'
        f"{participants_chart(report)}</svg>"
        f'<text class="heading" x="24" y="284">Loss</text>'
        f'<svg x="{left}" y="308" width="{inner}" height="{HEIGHT["loss"]}" overflow="visible">'
        f"{loss_chart(report)}</svg>{legend}</svg>\n"
    )


def _svg_legend(report: Report, right: float) -> Iterable[str]:
    kinds = [kind for kind in TYPES if any(type_class(f["type"]) == kind for f in report["failures"])]
    marks = [(f'<path class="mark t-{kind}" d="{_SHAPES[kind]}"/>', kind, 12) for kind in kinds]
    entries = [("run", "validation, this run")]
    if (report.get("reference") or {}).get("eval"):
        entries.append(("ref", "validation, without failures"))
    if _curve(report, "train"):
        entries.append(("train", "training, this run"))
    lines = [(f'<line class="{name}" x1="-8" x2="14" y1="0" y2="0"/>', label, 24) for name, label in entries]
    for y, row in ((30, marks), (280, lines)):
        widths = [gap + 6.6 * len(label) + 24 for _, label, gap in row]
        x = right - sum(widths) + 24
        for (drawn, label, gap), width in zip(row, widths, strict=True):
            yield f'<g transform="translate({x:.1f},{y})">{drawn}<text class="axis" x="{gap}" y="4">{label}</text></g>'
            x += width


def _duration(report: Report) -> float:
    ends = [s["end"] for r in report["replicas"] for s in r["lane"]]
    return max([float(report["summary"].get("duration") or 0.0), *ends]) or 1.0


def _curve(report: Report, name: str) -> list[list[float]]:
    return pairs(report["curves"].get(name))


def _tuples(points: Points) -> list[tuple[float, float]]:
    return [(p[0], p[1]) for p in points]


def _span(segment: dict[str, Any]) -> str:
    return f"for {units.seconds(segment['end'] - segment['start'])} from {units.elapsed(segment['start'])}"


def _path(scale: Scale, points: Points) -> str:
    return "".join(
        f"{'L' if i else 'M'}{_WIDTH * scale.x(p[0]) / 100:.1f},{scale.y(p[1]):.1f}" for i, p in enumerate(points)
    )


def _step_path(scale: Scale, points: Points, end: float) -> str:
    if not points:
        return ""
    parts = [f"M{_WIDTH * scale.x(points[0][0]) / 100:.2f},{scale.y(points[0][1]):.1f}"]
    parts += [f"H{_WIDTH * scale.x(x) / 100:.2f}V{scale.y(y):.1f}" for x, y in points[1:]]
    return "".join(parts) + f"H{_WIDTH * scale.x(end) / 100:.2f}"


def _area(scale: Scale, points: Points, end: float) -> str:
    if not points:
        return ""
    left = _WIDTH * scale.x(points[0][0]) / 100
    return f'<path class="area" d="{_step_path(scale, points, end)}V{scale.height}H{left:.2f}Z"/>'


def _lines(scale: Scale, *paths: str) -> str:
    return (
        f'<svg class="lines" width="100%" height="{scale.height}" viewBox="0 0 {_WIDTH:.0f} {scale.height}" '
        f'preserveAspectRatio="none">{"".join(paths)}</svg>'
    )


def _y_axis(scale: Scale, values: Sequence[float], title: str) -> str:
    parts = [f'<text class="axis title" x="-36" y="-4">{title}</text>']
    for v in values:
        y = scale.y(v)
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="axis" x="-9" y="{y + 4:.1f}" text-anchor="end">{v:g}</text>')
    return "".join(parts)


def _x_axis(scale: Scale, labelled: Sequence[tuple[float, str]], title: str) -> str:
    h = scale.height
    parts = [f'<line class="base" x1="0" x2="100%" y1="{h}" y2="{h}"/>']
    for i, (v, label) in enumerate(labelled):
        x = scale.x(v)
        alternate = " alt" if i % 2 and len(labelled) > 5 else ""
        parts.append(f'<line class="base" x1="{x:.3f}%" x2="{x:.3f}%" y1="{h}" y2="{h + 4}"/>')
        parts.append(f'<text class="axis{alternate}" x="{x:.3f}%" y="{h + 18}" text-anchor="middle">{label}</text>')
    parts.append(f'<text class="axis title" x="100%" y="{h + 34}" text-anchor="end">{title}</text>')
    return "".join(parts)


def _time_axis(scale: Scale) -> str:
    values, unit, name = units.time_ticks(scale.x1, 11)
    long_name = {"s": "seconds", "min": "minutes", "h": "hours"}[name]
    return _x_axis(scale, [(v, f"{v / unit:g}") for v in values], f"{long_name} since the start")


def _stems(scale: Scale, marks: Iterable[tuple[float, dict[str, Any]]]) -> str:
    placed = [(scale.x(v), type_class(f["type"])) for v, f in marks]
    return "".join(
        f'<line class="stem t-{kind}" x1="{x:.3f}%" x2="{x:.3f}%" y1="8" y2="{scale.height}"/>' for x, kind in placed
    )


def _marks(scale: Scale, marks: Iterable[tuple[float, dict[str, Any]]]) -> str:
    return "".join(_mark(scale.x(v), 8.0, f) for v, f in marks)


def _mark(x: float, y: float, failure: dict[str, Any]) -> str:
    kind = type_class(failure["type"])
    recovered = units.seconds(units.number(failure["seconds"].get("first_commit")))
    hint = f"{failure['index']}: {failure['type']} of replica {failure['replica']}"
    hint += f", recovered in {recovered}" if failure["outcome"] == "recovered" else f", {failure['outcome']}"
    # A nested svg is the one element that can be moved by per cents, which a transform in an attribute cannot.
    return (
        f'<svg x="{x:.3f}%" y="{y:.1f}" width="1" height="1" overflow="visible"><title>{html.escape(hint)}</title>'
        f'<path class="mark t-{kind}" d="{_SHAPES[kind]}"/></svg>'
    )
