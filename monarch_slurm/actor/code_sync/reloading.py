"""Modules of running procs whose files have changed."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Collection

from monarch_slurm.actor.actor import Actor
from monarch_slurm.actor.code_sync.tree import WorkspaceError
from monarch_slurm.actor.endpoint import endpoint


class Reloader(Actor):
    """Lives in a proc for one reload."""

    @endpoint
    def reload(self, files: set[str], paths: list[tuple[str, str]]) -> list[str]:
        """Load changed modules again, in the order of their first import; return their names.

        Args:
            files: paths of what has changed.
            paths: folders of the program's machine and their copies here, which are imported from, from now on.
        """
        sys.path[:] = map_paths(sys.path, paths)
        importlib.invalidate_caches()
        names = [name for name, file in module_files() if file in files]
        for name in names:
            try:
                importlib.reload(sys.modules[name])
            except Exception as error:
                raise WorkspaceError(f"module {name} has changed and cannot be loaded again: {error!r}") from error
        return names


def module_files() -> list[tuple[str, str]]:
    """Return name and real file of each module that was loaded from one."""
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name != "__main__" and isinstance(file, str) and getattr(module, "__spec__", None) is not None:
            found.append((name, os.path.realpath(file)))
    return found


def map_paths(paths: Collection[str], copies: Collection[tuple[str, str]]) -> list[str]:
    """Return search paths with those in copied folders replaced by the same in the copies."""
    mapped = []
    for path in paths:
        real = os.path.realpath(path) if path else path
        for source, copy in copies:
            if real == source or real.startswith(f"{source}/"):
                path = copy + real[len(source) :]
        if path not in mapped:
            mapped.append(path)
    return mapped
