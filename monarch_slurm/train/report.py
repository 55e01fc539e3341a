"""The report of a run: what it reached, what failed, and what that cost, as ``report.json`` and ``report.html``.

`build_report` is a function of the run's events and measures nothing itself; `write_report` puts both files in place in
one step each, so that a reader never meets half a report.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.owned_files import LARGE_BYTES, FileRefusedError, json_object, read_data, read_owned, write_whole
from monarch_slurm.train import curves, units
from monarch_slurm.train.event_index import EventIndex
from monarch_slurm.train.events import Event
from monarch_slurm.train.report_html import render
from monarch_slurm.train.timeline import STAGES, Failure, failures

SCHEMA = 1
REPORT = "report.json"
MOST_STEPS = 2000
"""A report keeps at most this many ``step`` events; a long run has millions."""

Report = dict[str, Any]


class ReportError(MonarchSlurmError):
    """A report cannot be read or written; the text says which file, and what is wrong with it."""


def build_report(events: Iterable[Event], reference: Mapping[str, Any] | Iterable[Event] | None = None) -> Report:
    """Return the report of a run, as plain values that JSON can hold.

    Args:
        events: all events of the run, in any order.
        reference: a run without failures to compare with: its report, or its events.

    The times in ``curves`` and ``replicas`` are seconds since ``started``; those in ``failures[...]["times"]`` and
    ``events`` are seconds since the epoch.
    """
    index = EventIndex(events)
    start, _ = index.span
    found = failures(index)
    lanes = curves.lanes(index, found)
    begun = next(reversed(index.kind("run_started")), {})
    compared = _reference(reference)
    report = {
        "schema": SCHEMA,
        "run": begun.get("run"),
        "started": start,
        "config": begun.get("config") or {},
        "versions": begun.get("versions") or {},
        "hosts": sorted({str(host) for e in index.kind("run_started") for host in e.get("hosts") or []}),
        "starts": _starts(index),
        "summary": _summary(index, found, lanes, compared),
        "failures": [f.to_dict() for f in found],
        "curves": {
            "participants": _since(start, curves.participants(index)),
            "training_replicas": _since(start, curves.training_replicas(lanes)),
            "tokens": _since(start, curves.committed_tokens(index)),
            "eval": curves.eval_loss(index),
            "train": curves.train_loss(index),
        },
        "replicas": _replicas(index, lanes, start),
        "marks": _marks(index, start),
        "reference": compared,
        "events": _thinned(index),
    }
    plain = _plain(report)
    assert isinstance(plain, dict)
    return plain


def write_report(directory: str | os.PathLike[str], report: Report) -> tuple[Path, Path]:
    """Write ``report.json`` and ``report.html`` into ``directory`` (made if missing) and return their paths.

    Each is written aside, flushed to the disk and renamed: it is there whole, or not at all.

    Raises:
        ReportError: the directory cannot be written to.
    """
    folder = Path(directory)
    json_path, html_path = folder / REPORT, folder / "report.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(json_path, json.dumps(_plain(report), allow_nan=False, separators=(",", ":")))
        _replace(html_path, render(report))
    except FileRefusedError as e:
        raise ReportError(str(e)) from None
    except OSError as e:
        raise ReportError(f"cannot write the report into {folder}: {e.strerror or e}") from e
    return json_path, html_path


def load_report(path: str | os.PathLike[str], *, to_continue: bool = False) -> Report:
    """Read a ``report.json``, or the one in a directory.

    Args:
        to_continue: a run goes on with what is in it, so that nobody else may have written it.

    Raises:
        ReportError: there is none, it is not a report, it was written by a newer release, or others may have written
            it.
    """
    file = Path(path)
    if file.is_dir():
        file = file / REPORT
    try:
        use = "to go on from it"
        data = read_owned(file, use, limit=LARGE_BYTES) if to_continue else read_data(file, limit=LARGE_BYTES)
        report = json_object(file, data)
    except FileNotFoundError as e:
        raise ReportError(f"no report at {file}; a run writes one when it ends") from e
    except FileRefusedError as e:
        raise ReportError(str(e)) from None
    if "schema" not in report:
        raise ReportError(f"{file} is JSON, but not the report of a run: it has no 'schema'")
    if report["schema"] != SCHEMA:
        raise ReportError(f"{file} has schema {report['schema']!r}; this release reads {SCHEMA}")
    missing = sorted({"summary", "failures", "curves", "replicas", "events"} - report.keys())
    if missing:
        raise ReportError(f"{file} lacks {', '.join(missing)}")
    kinds = {"summary": dict, "failures": list, "curves": dict, "replicas": list, "events": list}
    wrong = sorted(name for name, kind in kinds.items() if not isinstance(report[name], kind))
    if wrong:
        raise ReportError(f"{file} is not the report of a run: {', '.join(wrong)} cannot be what it says")
    return report


def _summary(
    index: EventIndex, found: list[Failure], lanes: dict[int, list[curves.Segment]], reference: dict[str, Any] | None
) -> dict[str, Any]:
    start, end = index.span
    tokens = curves.committed_tokens(index)
    finished = index.kind("run_finished")
    loss = _final_loss(index)
    expected = reference["final_loss"] if reference else None
    restarts = curves.restarts(index)
    return {
        "ok": finished[-1].get("ok") is True if finished else None,
        "reason": finished[-1].get("reason") if finished else None,
        "duration": end - start,
        "tokens": tokens[-1][1] if tokens else 0,
        "tokens_per_second": curves.tokens_per_second(index),
        "final_loss": loss,
        "reference_final_loss": expected,
        "relative_difference": (loss - expected) / expected if loss is not None and expected else None,
        "goodput": curves.goodput(index),
        "failures": len(found),
        "failures_by_type": dict(sorted(Counter(f.type for f in found).items())),
        "recovered": sum(f.outcome == "recovered" for f in found),
        "outcomes": dict(sorted(Counter(f.outcome for f in found).items())),
        "replicas_lost": len({e.get("replica") for e in index.kind("replica_lost") if index.is_last_word(e)}),
        "replica_restarts": sum(restarts.values()),
        "job_restarts": max(0, len(index.kind("run_started")) - 1),
        "syncs_lost": sum(f.syncs_lost for f in found),
        "states_compared": sum(f.state_equal is not None for f in found),
        "states_equal": sum(f.state_equal is True for f in found),
        "final_states_equal": _final_states_equal(index),
        "downtime": sum(curves.downtime(lane) for lane in lanes.values()),
        "stages": {stage: _middle_and_worst([f.seconds[stage] for f in found]) for stage in STAGES},
        "stall_longest": _middle_and_worst([f.stall_longest for f in found]),
        "stall_attributable": _middle_and_worst([f.stall_attributable for f in found]),
    }


def _middle_and_worst(values: Iterable[float | None]) -> dict[str, float | int | None]:
    known = [v for v in values if v is not None]
    return {
        "count": len(known),
        "median": statistics.median(known) if known else None,
        "worst": max(known, default=None),
    }


def _final_loss(index: EventIndex) -> float | None:
    """Return the validation loss that the trainers ended with, else the last one they told of."""
    ends = [loss for e in index.kept("finished") if (loss := units.number(e.get("loss"))) is not None]
    if ends:
        return sum(ends) / len(ends)
    evaluated = curves.eval_loss(index)
    return evaluated[-1][1] if evaluated else None


def _final_states_equal(index: EventIndex) -> bool | None:
    """Return whether all replicas ended with the same parameters; None if fewer than two told their hash."""
    by_rank: dict[int | None, list[str]] = {}
    for e in index.kept("finished"):
        if isinstance(e.get("sha256"), str):
            by_rank.setdefault(units.index(e.get("rank"), 0), []).append(e["sha256"])
    compared = [hashes for hashes in by_rank.values() if len(hashes) > 1]
    return all(len(set(hashes)) == 1 for hashes in compared) if compared else None


def _reference(reference: Mapping[str, Any] | Iterable[Event] | None) -> dict[str, Any] | None:
    if reference is None:
        return None
    if isinstance(reference, Mapping):
        curve, summary = reference.get("curves", {}).get("eval", []), reference.get("summary", {})
        return {"run": reference.get("run"), "eval": curve, "final_loss": units.number(summary.get("final_loss"))}
    index = EventIndex(reference)
    run = next((e.get("run") for e in index.kind("run_started")), None)
    return {"run": run, "eval": curves.eval_loss(index), "final_loss": _final_loss(index)}


def _replicas(index: EventIndex, lanes: dict[int, list[curves.Segment]], start: float) -> list[dict[str, Any]]:
    result = []
    restarts = curves.restarts(index)
    for replica, lane in lanes.items():
        generation = max(index.generations.get(replica, [0]))
        hosts = {str(e.get("host")) for e in index.of("trainer_started", replica, generation)}
        result.append(
            {
                "replica": replica,
                "hosts": sorted(hosts),
                "restarts": restarts.get(replica, 0),
                "downtime": curves.downtime(lane),
                "lost": any(s.state == curves.LOST for s in lane),
                "lane": [
                    {"state": s.state, "start": s.start - start, "end": s.end - start, "generation": s.generation}
                    for s in lane
                ],
            }
        )
    return result


def _starts(index: EventIndex) -> list[dict[str, Any]]:
    """Return each start of the run: when, in which job, on which hosts, from which step, and how it ended."""
    started, finished = index.kind("run_started"), index.kind("run_finished")
    result = []
    for i, e in enumerate(started):
        t = float(e["t"])
        until = float(started[i + 1]["t"]) if i + 1 < len(started) else math.inf
        end = next((f for f in finished if t <= float(f["t"]) < until), {})
        result.append(
            {
                "started": t,
                "ended": end.get("t"),
                "job": e.get("job"),
                "hosts": e.get("hosts") or [],
                "step": e.get("step") or 0,
                "changed": _changed(started[i - 1], e) if i else {},
                "saved_step": max(
                    (s["step"] for s in index.kind("state_saved") if t <= float(s["t"]) < until), default=None
                ),
                "ok": end.get("ok"),
                "reason": end.get("reason"),
            }
        )
    return result


def _changed(before: Event, now: Event) -> dict[str, list[Any]]:
    """Return the options of the run that are others than at the start before: what they were, and what they are."""
    old, new = before.get("config"), now.get("config")
    if not isinstance(old, dict) or not isinstance(new, dict):
        return {}
    return {name: [old[name], value] for name, value in new.items() if name in old and old[name] != value}


def _marks(index: EventIndex, start: float) -> list[dict[str, Any]]:
    """Return what else befell the run as a whole, for the text of the report."""
    return [
        {"kind": e["kind"], "t": float(e["t"]) - start, "replica": e.get("replica"), "host": e.get("host"),
         "text": e.get("reason") or e.get("cause") or e.get("level") or e.get("error")}
        for e in index.kind("escalated", "replica_lost", "host_lost", "quorum_service", "quorum_refused")
        if (e["kind"] != "replica_lost" or index.is_last_word(e)) and (e["kind"] != "quorum_service" or e.get("cause"))
    ]  # fmt: skip


def _thinned(index: EventIndex) -> list[Event]:
    steps = index.kind("step")
    every = max(1, math.ceil(len(steps) / MOST_STEPS))
    kept = {id(e) for e in steps[::every]}
    return [e for e in index.events if e["kind"] != "phase" and (e["kind"] != "step" or id(e) in kept)]


def _since(start: float, points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(round(t - start, 6), value) for t, value in points]


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON can hold it: keys are text, what is not finite is None, what is unknown is its text."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        # An undecodable byte of somebody's stderr must not keep the report from being written.
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(_plain(str(k))): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v) for v in value]
    return _plain(str(value))


def _replace(path: Path, text: str) -> None:
    write_whole(path, text.encode(), 0o644)
    # The rename itself is safe only once the directory is on the disk; some file systems cannot do that.
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
