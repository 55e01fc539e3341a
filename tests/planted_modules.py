"""Modules as another user would put them into a folder where somebody may start a program."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

EARLY = {"sys", "builtins", "marshal", "posix", "_imp", "_io", "_thread", "_warnings", "_weakref", "time", "__main__"}
"""Modules that no file can stand in for: they are built into the interpreter."""


def module_names() -> set[str]:
    """Names of all that a process of ours could import: this package, what is installed, the standard library."""
    installed = importlib.metadata.packages_distributions()
    names = {"monarch_slurm", "sitecustomize", "usercustomize", *installed, *sys.stdlib_module_names}
    return {name for name in names if name.isidentifier()} - EARLY - set(sys.builtin_module_names)


def plant(folder: Path, mark: Path) -> None:
    """Make a module of each name in ``folder``. One that is imported writes its name into ``mark``, and then fails."""
    for name in module_names():
        (folder / f"{name}.py").write_text(
            f"with open({str(mark)!r}, 'a') as mark:\n    mark.write({name!r} + '\\n')\nraise ImportError('planted')\n"
        )


def imported(mark: Path) -> list[str]:
    """Names of the planted modules that were imported."""
    return mark.read_text().split() if mark.exists() else []
