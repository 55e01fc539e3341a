"""Ranks with equal stacks as one, and what of a stack is worth a look. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import monarch_slurm
from monarch_slurm.rank_ranges import ranges

if TYPE_CHECKING:
    from monarch_slurm.host.stacks import Frame, Stacks, Thread

CONTROLLER_RANK = "controller"
"""Stands for a mesh in the rank of the controller."""

_HERE = Path(monarch_slurm.__file__).parent
_RUNTIME = tuple(f"{_HERE / part}/" for part in ("wire", "host", "actor"))
_PLUMBING = ("/threading.py", "/queue.py", "/selectors.py", "/runpy.py", "/contextvars.py")
_PLUMBING_PACKAGES = ("/asyncio/", "/concurrent/futures/")
IDLE = ["idle: waits for messages, or inside of an await"]


@dataclass(frozen=True)
class Rank:
    """One process of a program."""

    host: str
    mesh: str
    number: int
    stacks: Stacks


@dataclass(frozen=True)
class Group:
    """Ranks whose stacks are equal: who they are, and the lines to show."""

    title: str
    lines: list[str]


def group_ranks(ranks: list[Rank], all_threads: bool) -> list[Group]:
    """Return groups, the controller first, then the smallest: what is odd comes before what all do."""
    groups: dict[tuple[str, ...], list[Rank]] = defaultdict(list)
    for rank in ranks:
        kind = CONTROLLER_RANK if rank.mesh == CONTROLLER_RANK else ""
        key = (kind, *stack_lines(rank.stacks, all_threads))
        groups[key].append(rank)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0] != CONTROLLER_RANK, len(item[1])))
    return [Group(_title(members), list(key[1:])) for key, members in ordered]


def stack_lines(stacks: Stacks, all_threads: bool = False) -> list[str]:
    """Return the lines that show the stacks of one process."""
    lines = [stacks.note] if stacks.note else []
    shown = []
    for thread in stacks.threads:
        frames = thread.frames if all_threads else _of_interest(thread)
        if frames:
            shown.append((frames, thread.name))
    # The order and the numbers of threads differ between ranks that do the same.
    for frames, name in sorted(shown, key=lambda item: str(item)):
        if len(shown) > 1:
            lines.append(f"thread{f' {name}' if name else ''}:")
        lines += [f"  {frame.file}:{frame.line} in {frame.function}" for frame in frames]
    return lines or IDLE


def _of_interest(thread: Thread) -> list[Frame]:
    """Return the frames of a thread without the runtime's around them; none if the thread is the runtime's own."""
    frames = list(thread.frames)
    outer = next((i for i, frame in enumerate(frames) if not _is_plumbing(frame)), None)
    if outer is None:
        return []
    frames = frames[outer:]
    # Below, the user's code waits in the runtime: the first such frame tells in what.
    for index, frame in enumerate(frames):
        if _is_plumbing(frame) and all(_is_plumbing(inner) for inner in frames[index:]):
            return frames[: index + 1]
    return frames


def _is_plumbing(frame: Frame) -> bool:
    file = frame.file
    return (
        file.startswith(_RUNTIME)
        or file.endswith(_PLUMBING)
        or any(package in file for package in _PLUMBING_PACKAGES)
        or file.startswith("<frozen")
    )


def _title(members: list[Rank]) -> str:
    if members[0].mesh == CONTROLLER_RANK:
        return f"controller (pid {members[0].stacks.pid} on {members[0].host})"
    meshes: dict[str, list[int]] = defaultdict(list)
    for rank in members:
        meshes[rank.mesh].append(rank.number)
    count = f"{len(members)} rank{'s' if len(members) > 1 else ''}"
    names = "; ".join(f"{mesh} {ranges(numbers)}" for mesh, numbers in meshes.items())
    places = {rank.host for rank in members}
    where = f"on {places.pop()}" if len(places) == 1 else f"on {len(places)} hosts"
    pid = f", pid {members[0].stacks.pid}" if len(members) == 1 else ""
    return f"{count}: {names} ({where}{pid})"
