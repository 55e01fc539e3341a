"""Files that a job needs before anything of it runs: they are looked for before the job waits in a queue for them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from monarch_slurm.job.container import Container
from monarch_slurm.job.errors import JobSpecError


def check_files(
    program: Sequence[str], *, venv: str | None, container: Container | str | None, setup: Sequence[str]
) -> None:
    """Make sure that the files which a job names are here, for the nodes are to see the same ones.

    What may be on the nodes only is left alone: commands by name, absolute paths of commands, the program inside of a
    container, and everything if ``setup`` may make it.

    Raises:
        JobSpecError: one is not there; the text says which.
    """
    image = container.image if isinstance(container, Container) else container
    if image is not None and image.endswith((".sif", ".sqsh")):
        _check(image, image, "container image")
    if setup:
        return
    if venv is not None:
        _check(venv, os.path.join(venv, "bin", "activate"), "virtual environment")
    script = _script(program) if program and container is None else None
    if script is not None:
        path = script
        if os.path.isdir(script):
            if script is program[0] and not script.endswith(".py"):
                raise JobSpecError(f"program {script} is a folder; Python runs one: python {script}")
            path = os.path.join(script, "__main__.py")
        _check(script, path, "program")


def _script(program: Sequence[str]) -> str | None:
    """Return the file that ``program`` runs, if every node must see it."""
    first = program[0]
    if first.endswith(".py"):
        return first
    if "/" in first and not first.startswith(("/", "~")):
        return first
    is_python = os.path.basename(first).startswith("python")
    if is_python and len(program) > 1 and (program[1].endswith(".py") or os.path.isdir(program[1])):
        return program[1]
    return None


def _check(named: str, path: str, what: str) -> None:
    if Path(path).exists():
        return
    where = "" if os.path.isabs(named) else f" in {Path.cwd()}"
    found = f"is a folder without {os.path.relpath(path, named)}" if Path(named).is_dir() else f"is not there{where}"
    raise JobSpecError(f"{what} {named} {found}; all nodes must see it")
