"""The files of a folder: what they are, and which are left out. Nothing here follows a symbolic link."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from monarch_slurm.errors import MonarchSlurmError

RECORD = ".monarch-sync.json"
"""In each copied folder: what was copied there."""

STAGE = ".monarch-sync."
"""What the names of folders begin with in which files wait until all have come."""

MAX_PARTS = 64
"""Folders in each other."""

_CHUNK = 2**20


class WorkspaceError(MonarchSlurmError):
    """Code cannot be copied; the text says which file and why."""


class Entry(NamedTuple):
    """A file (with its digest) or a symbolic link (with its target)."""

    mode: int
    size: int
    mtime_ns: int
    digest: str
    link: str


Manifest = dict[str, Entry]
"""By path in the folder, with ``/``."""


def scan(folder: Path, exclude: Sequence[str], known: dict[str, tuple[Any, str]]) -> tuple[Manifest, list[str]]:
    """Return what is in a folder, and the links that were left out because they lead out of it.

    Args:
        known: digests of files that have been read before, by path, with what tells that a file is the same still;
            it is kept up.

    Raises:
        WorkspaceError: a file cannot be read.
    """
    manifest: Manifest = {}
    outside: list[str] = []
    try:
        for path, entry in walk(folder, exclude):
            info = entry.stat(follow_symlinks=False)
            if stat.S_ISLNK(info.st_mode):
                target = os.readlink(entry.path)
                if leads_out(path, target):
                    outside.append(path)
                else:
                    manifest[path] = Entry(0, 0, 0, "", target)
            elif stat.S_ISREG(info.st_mode):
                same = info.st_size, info.st_mtime_ns, info.st_ino, info.st_ctime_ns
                if known.get(entry.path, (None,))[0] != same:
                    known[entry.path] = same, digest_of(entry.path)
                mode = 0o755 if info.st_mode & 0o100 else 0o644
                manifest[path] = Entry(mode, info.st_size, info.st_mtime_ns, known[entry.path][1], "")
    except OSError as error:
        raise WorkspaceError(f"cannot copy {error.filename or folder}: {error.strerror}") from None
    return manifest, outside


def walk(folder: Path, exclude: Sequence[str]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield path and entry of everything in a folder that is no folder itself, in order."""
    todo = [""]
    while todo:
        prefix = todo.pop()
        with os.scandir(folder / prefix) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                path = f"{prefix}{entry.name}"
                if is_excluded(path, exclude):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    todo.append(f"{path}/")
                else:
                    yield path, entry


def is_excluded(path: str, exclude: Sequence[str]) -> bool:
    """Return whether a path is left out by its own name or as a whole."""
    name = path.rpartition("/")[2]
    if name == RECORD or name.startswith(STAGE):
        return True
    return any(fnmatchcase(name, pattern) or fnmatchcase(path, pattern.strip("/")) for pattern in exclude)


def digest_of(path: str | int) -> str:
    """Return the digest of a file's content."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb", closefd=not isinstance(path, int)) as file:
        while data := file.read(_CHUNK):
            digest.update(data)
    return digest.hexdigest()


def leads_out(path: str, target: str) -> bool:
    """Return whether a symbolic link at ``path`` leads out of the folder that the path is in."""
    if target.startswith("/") or not target:
        return True
    depth = path.count("/")
    for part in target.split("/"):
        depth += {"..": -1, ".": 0, "": 0}.get(part, 1)
        if depth < 0:
            return True
    return False


def split_path(path: str) -> list[str]:
    """Return the parts of a path in a folder.

    Raises:
        WorkspaceError: it is none, or leads out of the folder.
    """
    parts = path.split("/")
    if len(parts) > MAX_PARTS or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise WorkspaceError(f"{path!r} is no path inside of a folder")
    return parts


def copy_tree(folder: Path, target: Path, exclude: Sequence[str], copy: Callable[..., Any]) -> None:
    """Copy what `scan` finds into another folder of this machine.

    Raises:
        WorkspaceError: a file cannot be read or written.
    """
    try:
        for path, entry in walk(folder, exclude):
            if entry.is_file() or (entry.is_symlink() and not leads_out(path, os.readlink(entry.path))):
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                copy(entry.path, target / path, follow_symlinks=False)
    except OSError as error:
        raise WorkspaceError(f"cannot copy {error.filename or folder}: {error.strerror}") from None
