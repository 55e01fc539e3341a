"""Nodes that were lost or not fit, remembered beside the jobs' folders so that the next submission leaves them out."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from monarch_slurm.job.folder import write_whole
from monarch_slurm.job.nodelist import compress, expand
from monarch_slurm.job.request import SlurmRequest
from monarch_slurm.job.status import Run, run_command

logger = logging.getLogger(__name__)

SICK_FILE = ".sick-nodes.json"
"""In the folder of the jobs' folders. To use the nodes again before their time, remove it."""

SICK_SECONDS = 24 * 3600.0
"""Time for which a node is left out."""


def note_sick(base: Path, nodes: Mapping[str, str], now: float | None = None) -> None:
    """Remember ``nodes``, by name, and why."""
    now = time.time() if now is None else now
    known = {name: entry for name, entry in _read(base).items() if now - entry["at"] < SICK_SECONDS}
    known |= {name: {"at": now, "why": why} for name, why in nodes.items()}
    try:
        write_whole(base / SICK_FILE, json.dumps(known, indent=1).encode())
    except OSError as error:
        logger.warning("cannot remember that %s are sick: %s", ", ".join(nodes), error.strerror)


def sick_nodes(base: Path, now: float | None = None) -> dict[str, str]:
    """Return the nodes that are to be left out, and why."""
    now = time.time() if now is None else now
    return {name: entry["why"] for name, entry in _read(base).items() if now - entry["at"] < SICK_SECONDS}


def leave_out_sick(request: SlurmRequest, base: Path, run: Run = run_command) -> SlurmRequest:
    """Return ``request`` with the sick nodes of the cluster excluded, unless too few nodes would be left for it.

    Each component of a heterogeneous job is looked at by itself, with the nodes that others want of its partition.

    What the user has said of nodes wins: a list of nodes to use is left as it is.
    """
    sick = sick_nodes(base)
    if not sick:
        return request
    kinds = [request.of_kind(kind) for kind in range(len(request.kinds))]
    asked: Counter[str | None] = Counter()
    for kind in kinds:
        asked[kind.partition] += kind.all_nodes
    there = {partition: _nodes_of(partition, run) for partition in asked}
    excludes: list[str | None] = []
    left_out: dict[str, str] = {}
    too_few: dict[str, str] = {}
    for kind in kinds:
        nodes = there[kind.partition]
        excluded = set(expand(kind.exclude or ""))
        out = {name: sick[name] for name in sorted((sick.keys() & nodes) - excluded)}
        if not out or kind.nodelist is not None:
            excludes.append(kind.exclude)
        elif len(nodes - excluded) - len(out) < asked[kind.partition]:
            excludes.append(kind.exclude)
            too_few |= out
        else:
            excludes.append(compress(sorted(excluded | out.keys())))
            left_out |= out
    if too_few:
        logger.warning("nodes that were sick before may be used, for there are too few others: %s", _reasons(too_few))
    if not left_out:
        return request
    file = base / SICK_FILE
    logger.warning("leaving out nodes that were sick before (%s); remove %s to use them", _reasons(left_out), file)
    if not request.components:
        return replace(request, exclude=excludes[0])
    specs = zip(request.components, excludes, strict=True)
    return replace(request, components=tuple(replace(spec, exclude=exclude) for spec, exclude in specs))


def _nodes_of(partition: str | None, run: Run) -> set[str]:
    where = [] if partition is None else ["-p", partition]
    return set(run(["sinfo", "-h", "-N", "-o", "%N", *where]).stdout.split())


def _reasons(nodes: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in nodes.items())


def _read(base: Path) -> dict[str, dict[str, Any]]:
    try:
        found = json.loads((base / SICK_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
