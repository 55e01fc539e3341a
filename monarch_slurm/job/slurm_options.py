"""Options of sbatch and srun that a user adds to those of this package: what is refused, what is merged, what is kept.

This package sets some options itself and depends on them: a second ``--signal`` would replace the one by which the
program hears of the time limit, ``--array`` would submit jobs that share one folder. These are refused. Options that
`SlurmJob` has a keyword for become that keyword, so that everything that reads the keyword sees them. All others reach
Slurm as they are.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from monarch_slurm.job.errors import JobSpecError

_ONE_AGENT = "one host agent runs on each node; --cpus-per-task sets the CPUs of a node"
_LOGS = "all output is in the job's folder; --log-dir says where that is made"
_NO_JOB = "with it sbatch submits no job"

REFUSED_BY_SBATCH: Mapping[str, str] = {
    "array": "use SlurmJob.apply_array, or `sbatch --array` with a template of sbatch_templates",
    "batch": "the program runs on the first node",
    "chdir": "the program starts in the folder where the job is submitted",
    "clusters": "run this command on a login node of that cluster",
    "error": _LOGS,
    "export": "--env sets variables",
    "export-file": "--env sets variables",
    "help": _NO_JOB,
    "input": "a batch job has no input",
    "no-kill": "the job always survives the loss of a node",
    "no-requeue": "use --no-requeue of monarch-slurm (requeue=False)",
    "nodefile": "use --nodelist",
    "nodes": "use --nodes or --mesh (the sizes of the meshes)",
    "ntasks": _ONE_AGENT,
    "ntasks-per-core": _ONE_AGENT,
    "ntasks-per-gpu": _ONE_AGENT,
    "ntasks-per-node": _ONE_AGENT,
    "ntasks-per-socket": _ONE_AGENT,
    "open-mode": "logs are always appended to",
    "output": _LOGS,
    "parsable": "--json prints the job's number",
    "quiet": "sbatch would not tell the job's number",
    "requeue": "use --requeue of monarch-slurm (requeue=True)",
    "signal": "use --notice SECONDS (notice=), by which the program gets SIGTERM that long before the time limit",
    "test-only": "use --dry-run",
    "usage": _NO_JOB,
    "version": _NO_JOB,
    "wait": "use --follow",
    "wrap": "the program is given after the options",
}
"""Options of sbatch that are refused, and what to do instead."""

KEYWORDS: Mapping[str, str] = {
    "account": "account",
    "comment": "comment",
    "constraint": "constraint",
    "cpus-per-task": "cpus_per_task",
    "dependency": "dependency",
    "exclude": "exclude",
    "exclusive": "exclusive",
    "gpus-per-node": "gpus_per_node",
    "gres": "gres",
    "job-name": "job_name",
    "mem": "mem",
    "nodelist": "nodelist",
    "partition": "partition",
    "qos": "qos",
    "reservation": "reservation",
    "time": "time_limit",
}
"""Options of sbatch that are keywords of `monarch_slurm.job.SlurmJob`, too."""

_NUMBERS = ("cpus-per-task", "gpus-per-node")

REFUSED_BY_SRUN: Mapping[str, str] = {
    **dict.fromkeys(
        ("nodes", "ntasks", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket", "multi-prog"),
        "srun starts one task on one node",
    ),
    **dict.fromkeys(("nodelist", "nodefile", "exclude", "relative", "distribution"), "each host has its own srun"),
    **dict.fromkeys(("jobid", "het-group", "clusters"), "the steps belong to the job's own nodes"),
    **dict.fromkeys(("output", "error", "open-mode", "label"), "the output goes into the logs of the job's folder"),
    **dict.fromkeys(("input", "pty"), "a host agent has no input"),
    "bcast": "host agents run from the shared file system",
    "exclusive": "host agents share their nodes' CPUs with the program (--overlap)",
    "export": "--env sets variables",
    "job-name": "the package finds its steps by their names",
    **dict.fromkeys(("help", "usage", "version", "test-only"), "with it srun starts nothing"),
}
"""Options of srun that are refused, and why."""

_SHORT = {
    "A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "F": "nodefile", "G": "gpus", "H": "hold",
    "I": "immediate", "J": "job-name", "L": "licenses", "M": "clusters", "N": "nodes", "O": "overcommit", "Q": "quiet",
    "S": "core-spec", "V": "version", "W": "wait", "Z": "no-allocate", "a": "array", "b": "begin", "c": "cpus-per-task",
    "d": "dependency", "e": "error", "h": "help", "i": "input", "k": "no-kill", "l": "label", "m": "distribution",
    "n": "ntasks", "o": "output", "p": "partition", "q": "qos", "r": "relative", "s": "oversubscribe", "t": "time",
    "u": "unbuffered", "v": "verbose", "w": "nodelist", "x": "exclude",
}  # fmt: skip
_SHORT_FLAGS = frozenset("HOQVhklsuvZ")
_SBATCH_FLAGS = _SHORT_FLAGS | {"W"}  # which takes seconds in srun
_FULL_NAMES = frozenset({"gpus"})
"""Options whose names begin the name of an option in the tables above."""

ENVIRONMENT: Mapping[str, str] = {
    "SBATCH_ACCOUNT": "account", "SBATCH_ARRAY_INX": "array", "SBATCH_BATCH": "batch", "SBATCH_CLUSTERS": "clusters",
    "SBATCH_CONSTRAINT": "constraint", "SBATCH_ERROR": "error", "SBATCH_EXCLUSIVE": "exclusive",
    "SBATCH_EXPORT": "export", "SBATCH_GPUS_PER_NODE": "gpus-per-node", "SBATCH_GRES": "gres", "SBATCH_INPUT": "input",
    "SBATCH_JOB_NAME": "job-name", "SBATCH_MEM_PER_NODE": "mem", "SBATCH_NO_KILL": "no-kill",
    "SBATCH_NO_REQUEUE": "no-requeue", "SBATCH_OPEN_MODE": "open-mode", "SBATCH_OUTPUT": "output",
    "SBATCH_PARTITION": "partition", "SBATCH_QOS": "qos", "SBATCH_REQUEUE": "requeue",
    "SBATCH_RESERVATION": "reservation", "SBATCH_SIGNAL": "signal", "SBATCH_TIMELIMIT": "time", "SBATCH_WAIT": "wait",
}  # fmt: skip
"""Variables that sbatch reads as options. They win over the options in the script."""


def option_lines(arguments: Sequence[str]) -> list[str]:
    """Return sbatch's options in ``arguments``, one per line; ``["-C", "mi300"]`` may also be ``["-C mi300"]``.

    Raises:
        JobSpecError: a value has no option before it, or an argument has a line break.
    """
    lines: list[str] = []
    for argument in arguments:
        if "\n" in argument:
            raise JobSpecError(f"the Slurm option {argument!r} has a line break")
        if argument.startswith("-"):
            name, blank, value = argument.partition(" ")
            separate_value = blank and "=" not in name
            lines.append(f"{name} {shlex.quote(value)}" if separate_value else shlex.quote(argument))
        elif lines and " " not in lines[-1] and "=" not in lines[-1]:
            lines[-1] += f" {shlex.quote(argument)}"
        else:
            raise JobSpecError(f"Slurm option {argument!r}: an option starts with '-', such as --constraint=mi300")
    return lines


def merged_options(
    arguments: Sequence[str], keywords: Mapping[str, str] = KEYWORDS
) -> tuple[tuple[str, ...], dict[str, str | int | bool]]:
    """Return the options of sbatch that are left as they are, and the keywords of `SlurmJob` that the others stand for.

    Args:
        keywords: those that there are, by the options that they stand for.

    Raises:
        JobSpecError: an option cannot be given, or is no option.
    """
    kept: list[str] = []
    found: dict[str, str | int | bool] = {}
    for line in option_lines(arguments):
        words = shlex.split(line)
        options = _options(words, _SBATCH_FLAGS)
        for name, _ in options:
            _check(name, words[0], "sbatch", REFUSED_BY_SBATCH, KEYWORDS)
        name, value = options[-1]
        if len(options) > 1 or name not in keywords or not _fits(name, value):
            kept += words
        elif value is None:
            found[keywords[name]] = True
        else:
            found[keywords[name]] = int(value) if name in _NUMBERS else value
    return tuple(kept), found


def check_srun_options(arguments: Sequence[str]) -> None:
    """Refuse options of srun that this package sets itself.

    Raises:
        JobSpecError: an option cannot be given, or is no option.
    """
    for argument in arguments:
        if not argument.startswith("-") or "\n" in argument:
            raise JobSpecError(f"srun argument {argument!r}: write an option and its value as one, such as --mpi=pmix")
        for name, _ in _options([argument], _SHORT_FLAGS):
            _check(name, argument, "srun", REFUSED_BY_SRUN, {})


def ignored_variables(env: Mapping[str, str], given: Mapping[str, object]) -> tuple[list[str], list[str]]:
    """Return the variables of ``env`` that sbatch must not see: those that cannot be options, and those overridden.

    Args:
        given: keywords of `SlurmJob` and what they say; None says nothing.
    """
    refused = [name for name, option in ENVIRONMENT.items() if name in env and option in REFUSED_BY_SBATCH]
    overridden = [
        name
        for name, option in ENVIRONMENT.items()
        if name in env and option in KEYWORDS and given.get(KEYWORDS[option]) is not None
    ]
    return refused, overridden


def _options(words: Sequence[str], flags: frozenset[str]) -> list[tuple[str, str | None]]:
    """Return the long names of the options in one argument (and its value), each with its value.

    Several short options may stand in one argument; only the last one may have a value.
    """
    option, *rest = words
    value = rest[0] if rest else None
    if option.startswith("--"):
        name, equals, after = option[2:].partition("=")
        return [(name, after if equals else value)]
    found: list[tuple[str, str | None]] = []
    for position, letter in enumerate(option[1:], 1):
        name = _SHORT.get(letter, letter)
        if letter not in flags:
            return [*found, (name, option[position + 1 :] or value)]
        found.append((name, None))
    return found or [("", None)]


def _fits(name: str, value: str | None) -> bool:
    """Return whether the keyword can have this value, unlike ``--gpus-per-node=mi300x:8`` and ``--exclusive=user``."""
    if name == "exclusive":
        return value is None
    return value is not None and (name not in _NUMBERS or value.isdecimal())


def _check(name: str, given: str, command: str, refused: Mapping[str, str], keywords: Mapping[str, str]) -> None:
    if not name:
        raise JobSpecError(f"{given!r} is no option of {command}")
    if name in refused:
        raise JobSpecError(
            f"{given!r}: option --{name} of {command} cannot be given, for monarch_slurm depends on its own: "
            f"{refused[name]}"
        )
    if name in keywords or name in _FULL_NAMES:
        return
    if meant := [known for known in (*refused, *keywords) if known.startswith(name) and len(name) > 1]:
        raise JobSpecError(f"{given!r}: write the option of {command} in full: {' or '.join(f'--{m}' for m in meant)}")
