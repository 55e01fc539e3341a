"""Places of a user's own."""

from __future__ import annotations

import os
from pathlib import Path


def MONARCH_HOME(*subdir_paths: str) -> Path:  # noqa: N802 - Monarch's name
    """Return, and make, a folder under ``~/.monarch``, or under the one that ``$MONARCH_HOME`` names."""
    folder = Path(os.environ.get("MONARCH_HOME") or Path.home() / ".monarch").joinpath(*subdir_paths)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class conda:  # noqa: N801 - Monarch's name
    """The conda environment that is active."""

    @staticmethod
    def active_env_dir() -> str | None:
        """Return its folder; None if none is active."""
        return os.environ.get("CONDA_PREFIX")

    @staticmethod
    def active_env_name() -> str | None:
        """Return its name; None if none is active."""
        folder = conda.active_env_dir()
        return Path(folder).name if folder else None
