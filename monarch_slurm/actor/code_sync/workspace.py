"""Which folders of the program's machine go where in the hosts' ``$WORKSPACE_DIR``."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch_slurm.actor.code_sync.tree import WorkspaceError, copy_tree


class CondaEnvironment:
    """A conda environment of the program's machine.

    Args:
        conda_prefix: its folder; None for the one that is active when it is asked for.
    """

    def __init__(self, conda_prefix: str | None = None) -> None:
        self._conda_prefix = conda_prefix

    @property
    def conda_prefix(self) -> str:
        """Its folder.

        Raises:
            WorkspaceError: none was named, and none is active.
        """
        prefix = self._conda_prefix or os.environ.get(PREFIX_VARIABLE)
        if not prefix:
            raise WorkspaceError("no conda environment is active: activate one, or name its conda_prefix")
        return prefix

    def folder(self) -> Path:
        """Return its folder, without symbolic links.

        Raises:
            WorkspaceError: as of `conda_prefix`, or no conda environment is there.
        """
        folder = Path(self.conda_prefix).expanduser().resolve()
        if not (folder / "conda-meta").is_dir():
            raise WorkspaceError(f"{folder} is no conda environment: it has no folder conda-meta")
        return folder

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CondaEnvironment) and self._conda_prefix == other._conda_prefix

    def __hash__(self) -> int:
        return hash(self._conda_prefix)

    def __repr__(self) -> str:
        return f"CondaEnvironment({self._conda_prefix!r})"


ACTIVE_CONDA_ENV = CondaEnvironment()
"""The conda environment that the program runs in."""

PREFIX_VARIABLE = "CONDA_PREFIX"

WORKSPACE_VARIABLE = "WORKSPACE_DIR"

_IMAGE_ROOT = "${img_root}"
"""TorchX's name for the root of a role's image."""

DEFAULT_EXCLUDE = (
    ".git", ".hg", ".svn", "__pycache__", "*.pyc", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".ipynb_checkpoints",
    ".monarch", ".venv", "node_modules",
)  # fmt: skip

ENVIRONMENT_EXCLUDE = ("__pycache__", "*.pyc")


@dataclass(frozen=True)
class Workspace:
    """Folders to copy.

    Args:
        dirs: folders, each of which gets its own name in ``$WORKSPACE_DIR``; or a map from folders to the paths that
            they get there.
        env: the environment that ``sync_workspace(conda=True)`` copies, too.
        exclude: names, or paths in the folder, that are left out; ``*`` and ``?`` stand for anything.
    """

    dirs: Sequence[str | os.PathLike[str]] | Mapping[str | os.PathLike[str], str] | None = None
    env: CondaEnvironment | None = ACTIVE_CONDA_ENV
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

    def set_env_vars(self, appdef: Any) -> None:
        """Set what the roles of a TorchX ``AppDef`` need to find the folders: ``WORKSPACE_DIR`` and ``PYTHONPATH``, and
        ``CONDA_DIR`` if there is an environment. Variables that are set keep their values; ``PYTHONPATH`` is added to.

        Raises:
            WorkspaceError: as of `folders`.
        """
        places = self.folders().values()
        for role in appdef.roles:
            root = role.env.setdefault(WORKSPACE_VARIABLE, f"{_IMAGE_ROOT}/workspace")
            paths = [path for path in role.env.get("PYTHONPATH", "").split(":") if path]
            wanted = (os.path.normpath(f"{root}/{place}") for place in places)
            role.env["PYTHONPATH"] = ":".join(dict.fromkeys([*paths, *wanted]))
            if self.env is not None:
                role.env.setdefault("CONDA_DIR", f"{_IMAGE_ROOT}/conda")
