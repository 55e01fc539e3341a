"""The report as one page that opens anywhere: no network, no fonts, and no script needed to read it.

Everything that came from events passes through `_e`, so a traceback that holds markup is only text. The little script
of the page adds a read-out under the pointer; the page is whole without it.
"""

from __future__ import annotations

import html
import json
import time
from collections.abc import Callable, Iterable
from typing import Any

from monarch_slurm.train import units
from monarch_slurm.train.report_svg import (
    TYPES,
    Scale,
    asset,
    bar_chart,
    lanes_chart,
    loss_chart,
    pairs,
    participants_chart,
    participants_floor,
    plot_svg,
    symbol,
    type_class,
)
from monarch_slurm.train.timeline import STAGES

__all__ = ["plot_svg", "render"]

Report = dict[str, Any]

STAGE_NAMES = {
    "detected": "detected",
    "respawned": "respawned",
    "joined": "joined",
    "state_received": "state received",
    "first_commit": "first commit",
}


def render(report: Report) -> str:
    """Return the whole page for a report made by `monarch_slurm.train.report.build_report`."""
    sections = (
        _headline(report),
        _tiles(report),
        _figure(
            "Participants over time",
            "Size of the quorum (line) and replicas that hold the run's state (area). Each mark is a failure."
            + (f" The axis begins at {floor}." if (floor := participants_floor(report)) else ""),
            participants_chart(report),
            legend=_type_legend(report),
            hover="time",
        ),
        _figure("Loss", _loss_caption(report), loss_chart(report), legend=_loss_legend(report), hover="tokens"),
        _recoveries(report),
        _lanes(report),
        _table(report),
        _last_words(report),
        _facts(report),
    )
    title = f"{report.get('run') or 'Training run'}: report"
    data = json.dumps(_hover_data(report), separators=(",", ":")).replace("<", "\\u003c")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{_e(title)}</title>\n<style>{asset('chart.css')}{asset('report.css')}</style></head>\n<body><main>\n"
        + "\n".join(section for section in sections if section)
        + f'\n</main>\n<script type="application/json" id="series">{data}</script>'
        f"<script>{asset('report.js')}</script></body></html>\n"
    ).encode("utf-8", "backslashreplace").decode("utf-8")  # fmt: skip


def _e(value: Any) -> str:
    return html.escape("" if value is None else str(value), quote=True)


def _headline(report: Report) -> str:
    s = report["summary"]
    tokens, duration = units.count(units.number(s.get("tokens"))), units.seconds(units.number(s.get("duration")))
    if s.get("ok") is True:
        title, state = f"Finished: {tokens} tokens in {duration}", "good"
    elif s.get("ok") is False:
        title, state = f"Ended early after {duration}, at {tokens} tokens", "bad"
    elif report["events"]:
        title, state = f"The end is not known: the events stop after {duration}, at {tokens} tokens", "bad"
    else:
        title, state = "No events: nothing is known of this run", "bad"
    lines = [f"Reason: {_e(s['reason'])}."] if s.get("ok") is False and s.get("reason") else []
    if report["events"]:
        lines.append(_failures_line(s))
        jobs = int(s.get("job_restarts") or 0)
        lines.append(f"Restarts of the whole job: {jobs}.")
    for number, start in enumerate(report.get("starts", []), 1):
        for name, (before, now) in (start.get("changed") or {}).items():
            lines.append(f"Since start {number} {_e(name)} is {_e(now)}; it was {_e(before)}.")
    for m in report.get("marks", []):
        if m["kind"] == "replica_lost":
            lines.append(f"Replica {_e(m['replica'])} was lost for good at {units.elapsed(m['t'])}: {_e(m['text'])}.")
    config = report["config"] if isinstance(report["config"], dict) else {}
    where = [str(report["run"])] if report.get("run") else []
    if config.get("model"):
        where.append(f"model {config['model']}")
    if report["replicas"]:
        where.append(_plural(len(report["replicas"]), "replica"))
    if report["hosts"]:
        where.append(_plural(len(report["hosts"]), "host"))
    if report["events"]:
        where.append(time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(float(report["started"]))))
    return (
        f'<header class="{state}"><p class="where">{" · ".join(_e(w) for w in where)}</p><h1>{_e(title)}</h1>'
        f'<p class="lead">{" ".join(lines)}</p></header>'
    )


def _failures_line(summary: dict[str, Any]) -> str:
    total = int(summary["failures"])
    if total == 0:
        return "Nothing failed."
    kinds = ", ".join(f"{n} {_e(kind)}" for kind, n in summary["failures_by_type"].items())
    gone = sum(int(summary["outcomes"].get(name, 0)) for name in ("lost", "unrecovered"))
    survived = "all survived" if gone == 0 else f"{total - gone} survived"
    return f"{_plural(total, 'failure')} ({kinds}), {survived}."


def _tiles(report: Report) -> str:
    s = report["summary"]
    commit = s["stages"]["first_commit"]
    tiles: list[tuple[str, str, str]] = []
    loss, expected, difference = s.get("final_loss"), s.get("reference_final_loss"), s.get("relative_difference")
    if loss is not None:
        note = "no failure-free run to compare with"
        if expected is not None and difference is not None:
            note = f"{difference:+.2%} against {expected:.4f} without failures".replace("%", " %")
        tiles.append(("Validation loss", f"{loss:.4f}", note))
    if s.get("tokens_per_second") is not None:
        tiles.append(("Tokens per second", units.count(s["tokens_per_second"]), "failures included"))
    if s.get("goodput") is not None:
        tiles.append(("Goodput", units.percent(s["goodput"]), "of the inner steps were committed"))
    if commit["count"]:
        tiles.append(("Recovery, median", units.seconds(commit["median"]), f"worst {units.seconds(commit['worst'])}"))
    stall = s["stall_attributable"]
    if stall["count"]:
        note = f"of survivors, because of a failure; worst {units.seconds(stall['worst'])}"
        tiles.append(("Stall, median", units.seconds(stall["median"]), note))
    equal = s.get("final_states_equal")
    if equal is not None:
        note = "equal in all replicas, by sha256" if equal else "they should be equal in all replicas"
        tiles.append(("Final parameters", "equal" if equal else "different", note))
    if s.get("states_compared"):
        note = "transferred states equal the donor's, by sha256"
        tiles.append(("State transfers", f"{s['states_equal']} of {s['states_compared']}", note))
    cells = (f"<div><dt>{_e(n)}</dt><dd>{_e(v)}<small>{_e(note)}</small></dd></div>" for n, v, note in tiles)
    return f'<dl class="tiles">{"".join(cells)}</dl>' if tiles else ""


def _figure(title: str, caption: str, chart: str, legend: str = "", hover: str = "", height: float = 0) -> str:
    style = f' style="height:{height:.0f}px"' if height else ""
    readout = '<p class="readout" aria-hidden="true"></p>' if hover else ""
    data = f' data-hover="{hover}"' if hover else ""
    return (
        f"<figure><figcaption><h2>{_e(title)}</h2><p>{_e(caption)}</p>{legend}</figcaption>"
        f'<div class="plot"{data}><svg class="box {hover}"{style} role="img" aria-label="{_e(title)}">{chart}</svg>'
        f"{readout}</div></figure>"
    )


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    return '<p class="legend">' + "".join(f"<span>{mark}{_e(label)}</span>" for mark, label in entries) + "</p>"


def _type_legend(report: Report) -> str:
    present = sorted({str(f["type"]) for f in report["failures"]}, key=lambda k: (TYPES.index(type_class(k)), k))
    return _legend((symbol(kind), kind) for kind in present) if present else ""


def _loss_legend(report: Report) -> str:
    def stroke(name: str) -> str:
        return (
            f'<svg width="22" height="8" aria-hidden="true"><line class="{name}" x1="0" x2="22" y1="4" y2="4"/></svg>'
        )

    entries = [(stroke("run"), "validation, this run")]
    if (report.get("reference") or {}).get("eval"):
        entries.append((stroke("ref"), "validation, without failures"))
    if report["curves"].get("train"):
        entries.append((stroke("train"), "training, this run (mean over the replicas)"))
    return _legend(entries)


def _loss_caption(report: Report) -> str:
    has = bool((report.get("reference") or {}).get("eval"))
    text = "By committed tokens, so that work thrown away does not move the curve."
    return text if has else f"{text} There is no failure-free run to compare with."


def _recoveries(report: Report) -> str:
    found = report["failures"]
    if not found:
        return ""
    known = [units.number(f["seconds"].get(stage)) for f in found for stage in STAGES]
    longest = max([v for v in known if v is not None], default=0.0) or 1.0
    scale = Scale(0.0, longest * 1.02, 0.0, 1.0, 22)
    grid = units.ticks(0.0, longest * 1.02, 6)
    labels = "".join(
        f'<text class="axis" x="{scale.x(v):.3f}%" y="14" text-anchor="{"middle" if i else "start"}">{v:g}'
        f"{' s' if i == len(grid) - 1 else ''}</text>"
        for i, v in enumerate(grid)
    )
    heads = "".join(f'<span class="n">{STAGE_NAMES[s]}<i class="g-{s}"></i></span>' for s in STAGES)
    rows = [f'<div class="rec head"><span></span><svg class="bar" height="20">{labels}</svg>{heads}</div>']
    for f in found:
        numbers = "".join(
            f'<span class="n">{units.bare_seconds(units.number(f["seconds"].get(s)))}</span>' for s in STAGES
        )
        rows.append(
            f'<div class="rec"><span class="who">{symbol(f["type"])}<b>{f["index"]}</b> {_e(f["type"])}, '
            f"replica {f['replica']}</span>"
            f'<svg class="bar" height="22">{bar_chart(f, STAGES, scale, grid)}</svg>{numbers}</div>'
        )
    return (
        "<figure><figcaption><h2>Recoveries</h2><p>Seconds from the failure (the injection, or the detection when "
        "nothing was injected) to each stage.</p></figcaption>"
        f'<div class="recs">{"".join(rows)}</div></figure>'
    )


def _lanes(report: Report) -> str:
    if not report["replicas"]:
        return ""
    chart, height = lanes_chart(report)
    keys = [(f'<i class="key s-{state}"></i>', state) for state in ("training", "joining", "down", "lost")]
    present = {s["state"] for r in report["replicas"] for s in r["lane"]}
    legend = _legend((mark, label) for mark, label in keys if label in present)
    caption = "What each replica did. Joining is the time from the start of its procs until it holds the run's state."
    rows = "".join(
        f"<tr><td>{r['replica']}</td><td>{_e(', '.join(r['hosts']))}</td><td>{r['restarts']}</td>"
        f"<td>{units.seconds(units.number(r['downtime']))}</td><td>{'lost' if r['lost'] else ''}</td></tr>"
        for r in report["replicas"]
    )
    table = (
        '<details><summary>Restarts and downtime per replica</summary><div class="scroll"><table><thead><tr>'
        "<th>replica</th><th>last host</th><th>restarts</th><th>downtime</th><th></th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div></details>"
    )
    return _figure("Replicas", caption, chart, legend, height=height).replace("</figure>", f"{table}</figure>")


def _table(report: Report) -> str:
    found = report["failures"]
    if not found:
        return ""
    started = float(report["started"])
    ranks = any(f["rank"] for f in found)
    columns: list[tuple[str, str, Callable[[dict[str, Any]], str]]] = [
        ("#", "", lambda f: f'<a href="#f{f["index"]}">{f["index"]}</a>' if _has_words(f) else str(f["index"])),
        ("time", "", lambda f: units.elapsed(float(f["start"]) - started)),
        (
            "replica",
            "",
            lambda f: f"{f['replica']}.{f['rank']}" if ranks and f["rank"] is not None else str(f["replica"]),
        ),
        ("host", "text", lambda f: _e(f["host"]) or units.MISSING),
        ("type", "text", lambda f: f'<span class="type">{symbol(f["type"], 12)}{_e(f["type"])}</span>'),
        ("exit", "text", lambda f: _e(units.one_line(f["exit"], 40)) or units.MISSING),
        *((STAGE_NAMES[s], "", _stage(s)) for s in STAGES),
        ("stall", "", lambda f: units.bare_seconds(units.number(f["stall_longest"]))),
        ("attrib\u00adutable", "", lambda f: units.bare_seconds(units.number(f["stall_attributable"]))),
        ("syncs lost", "", lambda f: str(f["syncs_lost"])),
        (
            "state equal",
            "text",
            lambda f: {True: "yes", False: '<b class="no">no</b>'}.get(f["state_equal"], units.MISSING),
        ),
        ("outcome", "text", lambda f: _e(f["outcome"])),
    ]
    head = "".join(f'<th class="{kind}">{_e(name)}</th>' for name, kind, _ in columns)
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{show(f)}</td>' for _, kind, show in columns) + "</tr>" for f in found
    )
    note = (
        f"Times in seconds. {'Replica 2.1 is rank 1 of replica 2. ' if ranks else ''}"
        "Stall: the longest wait of a survivor for its next quorum; attributable: the part of it after every survivor "
        "had asked. Syncs lost: thrown away by survivors, "
        "summed over them."
    )
    return (
        f'<section><h2>Failures</h2><div class="scroll"><table class="failures"><thead><tr>{head}</tr></thead>'
        f'<tbody>{body}</tbody></table></div><p class="note">{note}</p></section>'
    )


def _stage(stage: str) -> Callable[[dict[str, Any]], str]:
    return lambda f: units.bare_seconds(units.number(f["seconds"].get(stage)))


def _has_words(failure: dict[str, Any]) -> bool:
    return bool(failure["traceback"] or failure["stderr_tail"] or failure["cause"])


def _last_words(report: Report) -> str:
    parts = []
    for f in report["failures"]:
        if not _has_words(f):
            continue
        head = f"{f['index']}. {f['type']}, replica {f['replica']}" + (f" on {f['host']}" if f["host"] else "")
        text = units.one_line(f["cause"] or f["exit"], 120)
        blocks = [f"<p>{_e(line)}</p>" for line in f["escalated"]]
        if f["traceback"]:
            blocks.append(f"<h4>Traceback</h4><pre>{_e(f['traceback'])}</pre>")
        if f["stderr_tail"]:
            lines = "\n".join(str(line) for line in f["stderr_tail"])
            blocks.append(f"<h4>Last lines of stderr</h4><pre>{_e(lines)}</pre>")
        parts.append(
            f'<details id="f{f["index"]}"><summary>{symbol(f["type"], 12)}<b>{_e(head)}</b> {_e(text)}</summary>'
            f"{''.join(blocks)}</details>"
        )
    return f"<section><h2>Last words</h2>{''.join(parts)}</section>" if parts else ""


def _facts(report: Report) -> str:
    blocks = []
    for name in ("config", "versions"):
        values = report[name] if isinstance(report[name], dict) else {}
        if values:
            rows = "".join(f"<div><dt>{_e(k)}</dt><dd>{_e(_value(v))}</dd></div>" for k, v in values.items())
            blocks.append(f'<section><h2>{name.capitalize()}</h2><dl class="facts">{rows}</dl></section>')
    hosts = report["hosts"] if isinstance(report["hosts"], list) else [report["hosts"]]
    if hosts:
        blocks.append(f'<section><h2>Hosts</h2><p class="mono">{_e(", ".join(str(h) for h in hosts))}</p></section>')
    return f'<div class="split">{"".join(blocks)}</div>' if blocks else ""


def _value(value: Any) -> str:
    return "none" if value is None else json.dumps(value) if isinstance(value, (dict, list, bool)) else str(value)


def _hover_data(report: Report) -> dict[str, Any]:
    """Return the series that the page's script reads out under the pointer."""
    duration = max(
        [float(report["summary"].get("duration") or 0.0)] + [s["end"] for r in report["replicas"] for s in r["lane"]]
    )
    curves = {
        name: pairs(report["curves"].get(name)) for name in ("participants", "training_replicas", "eval", "train")
    }
    reference = pairs((report.get("reference") or {}).get("eval"))
    losses = [*curves["eval"], *curves["train"], *reference]
    return {
        "time": {
            "end": duration or 1.0,
            "series": [["quorum", curves["participants"]], ["with state", curves["training_replicas"]]],
        },
        "tokens": {
            "end": max([p[0] for p in losses], default=0) or 1.0,
            "series": [["validation", curves["eval"]], ["without failures", reference], ["training", curves["train"]]],
        },
    }


def _plural(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
