"""How the process of a proc is started: forked from the agent's zygote, or by a command of the user's."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from monarch_slurm.actor.shape import Point
from monarch_slurm.host.proc import ENTRY_ARGUMENTS


@dataclass
class BootstrapCommand:
    """A command that runs a proc. It must hand its environment and open files on to the Python program in it.

    A proc that is started by a command imports what it needs by itself, which takes longer than a fork of the zygote.

    Attributes:
        program: path of the program, or its name, which is looked for in ``PATH`` of the proc's host.
        arg0: what the program sees as its own name; None for ``program``.
        args: arguments. Those of `default_bootstrap_cmd` make a Python interpreter run the proc.
        env: environment variables to set, or with None to remove.
        inherit_env: start from the environment of the host's agent; else from an empty one.
    """

    program: str
    arg0: str | None = None
    args: Sequence[str] = field(default_factory=list)
    env: Mapping[str, str | None] = field(default_factory=dict)
    inherit_env: bool = True

    def with_env(self, env: Mapping[str, str | None]) -> BootstrapCommand:
        """Return a copy that sets these variables, too."""
        return dataclasses.replace(self, env={**self.env, **env})


Bootstrap = BootstrapCommand | Callable[[Point], BootstrapCommand]
"""One command for all procs, or one for each place in the mesh."""


def default_bootstrap_cmd() -> BootstrapCommand:
    """Return the command that runs a proc with this program's Python."""
    return BootstrapCommand(sys.executable, None, list(ENTRY_ARGUMENTS))


def command_fields(command: Bootstrap | None, python: str, point: Point) -> dict[str, object]:
    """Return what a request for a proc says of its command; nothing for a fork of the zygote.

    Args:
        python: the interpreter to use where no command is given; empty for the zygote's.

    Raises:
        TypeError: ``command`` is no `BootstrapCommand` and makes none.
    """
    if command is None and python:
        command = BootstrapCommand(python, None, ENTRY_ARGUMENTS)
    if command is not None and not isinstance(command, BootstrapCommand):
        command = command(point)
    if command is None:
        return {"command": [], "env": {}, "inherit_env": True}
    if not isinstance(command, BootstrapCommand):
        raise TypeError(f"a BootstrapCommand expected for {point}, not {type(command).__name__}")
    return {
        "command": [command.program, command.arg0 or command.program, *command.args],
        "env": dict(command.env),
        "inherit_env": command.inherit_env,
    }
