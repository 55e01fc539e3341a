"""Which folders of the program's machine go where in the hosts' ``$WORKSPACE_DIR``."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch_slurm.actor.code_sync.tree import WorkspaceError, copy_tree

ACTIVE_CONDA_ENV = "active"
"""Stands for the conda environment that the program runs in."""

DEFAULT_EXCLUDE = (
    ".git", ".hg", ".svn", "__pycache__", "*.pyc", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".ipynb_checkpoints",
    ".monarch", ".venv", "node_modules",
)  # fmt: skip


@dataclass(frozen=True)
class Workspace:
    """Folders to copy.

    Args:
        dirs: folders, each of which gets its own name in ``$WORKSPACE_DIR``; or a map from folders to the paths that
            they get there.
        env: for Monarch's sake; environments are not copied.
        exclude: names, or paths in the folder, that are left out; ``*`` and ``?`` stand for anything.
    """

    dirs: Sequence[str | os.PathLike[str]] | Mapping[str | os.PathLike[str], str] | None = None
    env: str | os.PathLike[str] | None = ACTIVE_CONDA_ENV
    exclude: Sequence[str] = DEFAULT_EXCLUDE

    @staticmethod
    def null() -> Workspace:
        """Return a workspace without folders."""
        return Workspace(env=None)

    def folders(self) -> dict[Path, str]:
        """Return each folder and its path in ``$WORKSPACE_DIR``.

        Raises:
            WorkspaceError: one is no folder, or its place is outside of the workspace, or inside of another's.
        """
        if isinstance(self.dirs, Mapping):
            named = [(Path(folder).expanduser(), str(place)) for folder, place in self.dirs.items()]
        else:
            named = [
                (folder, folder.absolute().name) for folder in (Path(each).expanduser() for each in self.dirs or ())
            ]
        found: dict[Path, str] = {}
        for folder, place in named:
            parts = Path(place).parts
            if Path(place).is_absolute() or ".." in parts:
                raise WorkspaceError(f"{folder}: its place {place!r} is outside of the workspace")
            try:
                real = folder.resolve(strict=True)
            except OSError as error:
                raise WorkspaceError(f"cannot copy {folder}: {error.strerror}") from None
            if not real.is_dir():
                raise WorkspaceError(f"cannot copy {folder}: it is no folder")
            found[real] = os.path.join(*parts) if parts else "."
        places = sorted(Path(place).parts for place in found.values())
        for one, other in itertools.pairwise(places):
            if other[: len(one)] == one:
                inside = f"{os.path.join(*other)!r} is inside of {os.path.join('.', *one)!r}"
                raise WorkspaceError(f"folders of a workspace cannot be inside of each other: {inside}")
        return found

    def merge(self, outdir: str | os.PathLike[str]) -> None:
        """Copy the folders into ``outdir``, as they would be in ``$WORKSPACE_DIR``.

        Raises:
            WorkspaceError: as of `folders`, or they cannot be read.
        """
        for folder, place in self.folders().items():
            target = Path(outdir) / place
            target.mkdir(parents=True, exist_ok=True)
            copy_tree(folder, target, self.exclude, shutil.copy2)
