"""Nodes that were lost or not fit, remembered beside the jobs' folders so that the next submission leaves them out.

How long depends on the evidence. A health check that has failed would fail again: a day. An agent that did not start
may have had a reason of its own: an hour. A node that fell silent may have been busy, stopped or without a network for
seconds: ten minutes, which is twice the time after which Slurm itself calls a node down (``SlurmdTimeout``, 300 s
unless set). Every further silence within a day makes the time longer. A node that joins its job again is well.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from monarch_slurm.job.folder import tell_once
from monarch_slurm.job.node_states import nodes_for
from monarch_slurm.job.nodelist import compress, expand
from monarch_slurm.job.request import SlurmRequest
from monarch_slurm.job.status import Run, answers_within
from monarch_slurm.owned_files import FileRefusedError, json_object, owned_json, read_owned, write_whole

logger = logging.getLogger(__name__)

SICK_FILE = ".sick-nodes.json"
"""In the folder of the jobs' folders. To use the nodes again before their time, remove it."""

UNFIT_SECONDS = 24 * 3600.0
"""Time for which a node is left out whose health check has failed."""

NOT_STARTED_SECONDS = 3600.0
"""Time for which a node is left out whose agent did not start."""

SILENT_SECONDS = (600.0, 3600.0, 24 * 3600.0)
"""Time for which a node is left out that fell silent once, twice, and more often within a day."""

_MEMORY_SECONDS = 24 * 3600.0
_ASK_SECONDS = 10.0
_LATEST = 1e11  # seconds since the epoch: more has no date


@dataclass(frozen=True)
class SickNode:
    """What is remembered of a node.

    Attributes:
        at: when it was noted, seconds since the epoch.
        why: for a person.
        seconds: for which it is left out; 0 if it has joined its job again.
        silences: how often it has fallen silent within a day.
        by_silence: whether it is left out for a silence, which ends when it joins again.
    """

    at: float
    why: str
    seconds: float
    silences: int = 0
    by_silence: bool = False


def note_sick(base: Path, nodes: Mapping[str, str], seconds: float = UNFIT_SECONDS, now: float | None = None) -> None:
    """Remember ``nodes``, by name, and why; ``seconds`` is the time for which they are left out."""
    now = time.time() if now is None else now
    known = _remembered(base, now)
    for name, why in nodes.items():
        before = known.get(name)
        if before is None or before.at + before.seconds < now + seconds:
            known[name] = SickNode(now, why, seconds, before.silences if before is not None else 0)
    _write(base, known)


def note_silent(base: Path, name: str, why: str, now: float | None = None) -> None:
    """Remember that a node fell silent, and why that is thought."""
    now = time.time() if now is None else now
    known = _remembered(base, now)
    before = known.get(name)
    silences = 1 + (before.silences if before is not None else 0)
    seconds = SILENT_SECONDS[min(silences, len(SILENT_SECONDS)) - 1]
    if before is not None and before.at + before.seconds > now + seconds:
        known[name] = replace(before, silences=silences)
    else:
        times = "" if silences == 1 else f", {silences} times within a day"
        known[name] = SickNode(now, why + times, seconds, silences, by_silence=True)
    _write(base, known)


def note_joined(base: Path, name: str, now: float | None = None) -> None:
    """Use a node again that had fallen silent and has joined its job again."""
    now = time.time() if now is None else now
    known = _remembered(base, now)
    before = known.get(name)
    if before is not None and before.by_silence:
        known[name] = replace(before, seconds=0.0)
        _write(base, known)


def sick_nodes(base: Path, now: float | None = None) -> dict[str, SickNode]:
    """Return the nodes that are to be left out."""
    now = time.time() if now is None else now
    return {name: node for name, node in _remembered(base, now).items() if now < node.at + node.seconds}


def leave_out_sick(
    request: SlurmRequest, base: Path, notice: Callable[[str], None] = logger.warning, run: Run | None = None
) -> SlurmRequest:
    """Return ``request`` with the sick nodes excluded, as many as Slurm can do without.

    Slurm can give a node that answers, is not down, drained or reserved, and is what the request asks for. What cannot
    be judged here counts as not given: then sick nodes are used rather than waited for in vain.

    What the user has said of nodes wins: a list of nodes to use is left as it is.

    Args:
        notice: is called with a line for the user, if there are sick nodes.
        run: runs Slurm's commands.
    """
    sick = sick_nodes(base) if request.avoid else {}
    if not sick:
        return request
    kinds = [request.of_kind(kind) for kind in range(len(request.kinds))]
    there = nodes_for(kinds, run or answers_within(_ASK_SECONDS))
    wanted = [kind.all_nodes for kind in kinds]
    free_to_choose = [kind.nodelist is None for kind in kinds]
    out: set[str] = set()
    needed: set[str] = set()
    # The longest excluded ones first: of those the evidence is strongest.
    for name in sorted(sick, key=lambda name: (-(sick[name].at + sick[name].seconds), name)):
        if not any(name in nodes for nodes, free in zip(there, free_to_choose, strict=True) if free):
            continue
        left = [
            nodes.keys() - (out | {name} if free else set()) for nodes, free in zip(there, free_to_choose, strict=True)
        ]
        (out if _enough(left, wanted) else needed).add(name)
    if needed:
        notice(f"using nodes that were lost or not fit, because Slurm has too few others: {_reasons(sick, needed)}")
    if not out:
        return request
    notice(
        f"leaving out nodes that were lost or not fit: {_reasons(sick, out)}. To use them, give --no-avoid "
        f"(avoid=False) or remove {base / SICK_FILE}"
    )
    excludes = [
        _excluding(kind.exclude, out & nodes.keys()) if free else kind.exclude
        for kind, nodes, free in zip(kinds, there, free_to_choose, strict=True)
    ]
    if not request.components:
        return replace(request, exclude=excludes[0])
    specs = zip(request.components, excludes, strict=True)
    return replace(request, components=tuple(replace(spec, exclude=exclude) for spec, exclude in specs))


def _enough(there: Sequence[set[str]], wanted: Sequence[int]) -> bool:
    """Return whether each kind of nodes can have as many as it wants, no node for two of them (Hall's theorem)."""
    kinds = range(len(wanted))
    return all(
        len(set().union(*(there[kind] for kind in some))) >= sum(wanted[kind] for kind in some)
        for count in range(1, len(wanted) + 1)
        for some in itertools.combinations(kinds, count)
    )


def _excluding(exclude: str | None, names: set[str]) -> str | None:
    return compress(sorted({*expand(exclude or ""), *names})) if names else exclude


def _reasons(sick: Mapping[str, SickNode], names: set[str]) -> str:
    def until(node: SickNode) -> str:
        return time.strftime("%d %b %H:%M", time.localtime(node.at + node.seconds))

    return "; ".join(f"{name} ({sick[name].why}; until {until(sick[name])})" for name in sorted(names))


def _remembered(base: Path, now: float) -> dict[str, SickNode]:
    """Return what is remembered. What makes no sense is left out, and the log says so in a line."""
    path = base / SICK_FILE
    try:
        found = owned_json(path, "to leave out nodes for it")
    except FileNotFoundError:
        return {}
    except FileRefusedError as error:
        tell_once(f"nodes that were lost or not fit are not left out: {error}")
        return {}
    nodes = {name: node for name, entry in found.items() if (node := _node(entry)) is not None}
    if len(nodes) < len(found):
        tell_once(f"{path}: {len(found) - len(nodes)} of {len(found)} entries make no sense and are ignored")
    return {name: node for name, node in nodes.items() if now - node.at < _MEMORY_SECONDS}


def _node(entry: object) -> SickNode | None:
    if not isinstance(entry, dict):
        return None
    told = {"seconds": SILENT_SECONDS[0], "silences": 0, "by_silence": False, **entry}
    if told.keys() != {each.name for each in fields(SickNode)} or not isinstance(told["why"], str):
        return None
    numbers = (told["at"], told["seconds"], told["silences"])
    if not all(type(each) in (int, float) and 0 <= each < _LATEST for each in numbers):
        return None
    return SickNode(**{**told, "silences": int(told["silences"]), "by_silence": told["by_silence"] is True})


def _write(base: Path, known: Mapping[str, SickNode]) -> None:
    path = base / SICK_FILE
    try:
        text = json.dumps({name: asdict(node) for name, node in known.items()}, indent=1)
        _keep_damaged(path)
        write_whole(path, text.encode())
    except FileRefusedError as error:
        logger.warning("cannot remember which nodes are sick: %s", error)
    except OSError as error:
        logger.warning("cannot remember which nodes are sick: %s: %s", path, error.strerror)


def _keep_damaged(path: Path) -> None:
    """Keep a file that this module has not written under another name, for whoever wants to see what happened.

    Raises:
        FileRefusedError: it is somebody else's; it stays as it is.
    """
    try:
        json_object(path, read_owned(path, "to replace it"))
    except FileNotFoundError:
        return
    except FileRefusedError:
        if os.lstat(path).st_uid != os.getuid():
            raise
        os.replace(path, path.with_name(f"{path.name}.damaged"))
