"""How processes of this package start Python, so that nothing in the current folder is imported by them.

``python -m`` and ``python -c`` put the current folder first on ``sys.path``. In a folder that others may write to, such
as ``/tmp``, a file ``zmq.py`` there would run as whoever starts the program. Python 3.11 has ``-P`` against that; 3.10
has not, and inside of containers the version is not known here. So the command line itself takes the current folder off
the path, by a line of code that imports nothing before. Entries of ``PYTHONPATH`` that are empty or relative mean the
current folder, too: they are left out of the child's environment and restored when it has started, for they belong to
the user's own programs.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

SAFE_PATH = "import sys; sys.path[:] = filter(None, sys.path); "
"""Python code that comes first in whatever runs by ``-c``: ``sys`` is built in, and the empty entry is ``-c``'s own."""

_RUN = f"{SAFE_PATH}from monarch_slurm.interpreter import run_module; run_module()"

_PATH = "PYTHONPATH"

GIVEN_PATH_VARIABLE = "MONARCH_SLURM_PYTHONPATH"
"""Environment variable: ``PYTHONPATH`` as the user has set it, while ``PYTHONPATH`` itself has no relative entries."""

PRELOAD_PATH_VARIABLE = "MONARCH_SLURM_PRELOAD_PATH"
"""Environment variable: ``sys.path`` of the program, where the zygote looks for modules that the user preloads."""

SHELL_LINES = (
    f'if [ -n "${{{_PATH}-}}" ]; then',
    f"    export {GIVEN_PATH_VARIABLE}=${_PATH}",
    f"    {_PATH}=$(tr : '\\n' <<< \"${_PATH}\" | grep ^/ | paste -sd: -)",
    "fi",
)
"""Lines of bash that do to ``PYTHONPATH`` what `python_environment` does."""


def module_arguments(module: str, *arguments: str) -> list[str]:
    """Return the arguments with which any Python from 3.10 on runs ``main()`` of a module of this package."""
    return ["-c", _RUN, module, *arguments]


def module_command(module: str, *arguments: str, python: Sequence[str] = ()) -> list[str]:
    """Return the command line that runs ``main()`` of a module of this package.

    Args:
        python: words that start Python, with its options; none is the Python of this process.
    """
    return [*(python or [sys.executable]), *module_arguments(module, *arguments)]


def module_line(python: str, module: str, *arguments: str) -> str:
    """Return `module_command` as a line for a shell; ``python`` is a part of such a line."""
    return f"{python} {shlex.join(module_arguments(module, *arguments))}"


def python_environment(base: Mapping[str, str] | None = None, *, find_package: bool = False) -> dict[str, str]:
    """Return the environment for a Python process of this package: ``PYTHONPATH`` has absolute entries only.

    `run_module` puts back what was left out.

    Args:
        base: environment to start from; None is that of this process.
        find_package: have the other Python find this package where this process has it.
    """
    env = dict(os.environ if base is None else base)
    given = env.get(_PATH, "")
    home = str(Path(__file__).parent.parent)
    there = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *given.split(os.pathsep))
    if find_package and home not in there:
        given = os.pathsep.join(filter(None, [home, given]))
    absolute = _absolute(given)
    if absolute != given:
        env[GIVEN_PATH_VARIABLE] = given
    if given or _PATH in env:
        env[_PATH] = absolute
    return env


def restore_environment() -> None:
    """Give ``PYTHONPATH`` back to what this process starts; what the user has set there is for the user's programs.

    One that was set meanwhile, by the image of a container, stays as it is.
    """
    given = os.environ.pop(GIVEN_PATH_VARIABLE, None)
    if given is not None and os.environ.get(_PATH, "") == _absolute(given):
        os.environ[_PATH] = given


def _absolute(path: str) -> str:
    return os.pathsep.join(filter(os.path.isabs, path.split(os.pathsep)))


def forget_relative_entries() -> None:
    """Take what empty and relative entries of ``PYTHONPATH`` have become off ``sys.path``.

    For processes that a person or a batch script has started: Python has made these entries absolute by now.
    """
    entries = os.environ.get(_PATH, "").split(os.pathsep) if os.environ.get(_PATH) else []
    relative = {os.path.abspath(entry) for entry in entries if not os.path.isabs(entry)}
    kept = {os.path.normpath(entry) for entry in entries if os.path.isabs(entry)}
    sys.path[:] = [entry for entry in sys.path if entry and (entry not in relative or entry in kept)]


def run_module() -> NoReturn:
    """Run ``main()`` of the module that the first argument names, or of its ``__main__``; leave with its code."""
    forget_relative_entries()
    restore_environment()
    name = sys.argv.pop(1)
    sys.argv[0] = name
    module = importlib.import_module(name)
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{name}.__main__")
    sys.exit(module.main())


def user_path() -> list[str]:
    """Return where the user's own modules are: folders that are on the program's ``sys.path`` and may not be on ours.

    Those of the program that has started this process, if it says so, else all entries of ``PYTHONPATH``.
    """
    told = os.environ.get(PRELOAD_PATH_VARIABLE)
    entries = (os.environ.get(_PATH, "") if told is None else told).split(os.pathsep)
    return [os.path.abspath(entry) for entry in entries] if any(entries) else []


def program_path() -> str:
    """Return ``sys.path`` of this process as the value of ``MONARCH_SLURM_PRELOAD_PATH``."""
    folders = (os.path.abspath(entry) for entry in sys.path if isinstance(entry, str))
    return os.pathsep.join(folder for folder in folders if os.pathsep not in folder)
