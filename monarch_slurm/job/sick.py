"""Nodes that were lost or not fit, remembered beside the jobs' folders so that the next submission leaves them out."""

from __future__ import annotations

import json
import logging
import time
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

    What the user has said of nodes wins: a list of nodes to use is left as it is.
    """
    sick = sick_nodes(base)
    if not sick or request.nodelist is not None or request.components:
        return request
    listed = run(["sinfo", "-h", "-N", "-o", "%N", *(["-p", request.partition] if request.partition else [])])
    there = set(listed.stdout.split())
    excluded = set(expand(request.exclude or ""))
    out = sorted((sick.keys() & there) - excluded)
    if not out:
        return request
    reasons = "; ".join(f"{name}: {sick[name]}" for name in out)
    if len(there - excluded) - len(out) < request.all_nodes:
        logger.warning("nodes that were sick before may be used, for there are too few others: %s", reasons)
        return request
    logger.warning("leaving out nodes that were sick before (%s); remove %s to use them", reasons, base / SICK_FILE)
    return replace(request, exclude=compress(sorted(excluded | set(out))))


def _read(base: Path) -> dict[str, dict[str, Any]]:
    try:
        found = json.loads((base / SICK_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
