"""Settings of this process: defaults, then the environment, then `configure`.

A client's settings reach the host agents that it starts and the procs that those spawn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from monarch_slurm.errors import ConfigError

_ENV_PREFIX = "MONARCH_SLURM_"


@dataclass
class _Settings:
    heartbeat_interval: float = 1.0
    """Seconds between two heartbeats of a host agent and the controller."""
    missed_heartbeats: int = 3
    """A host is dead after this many intervals of silence."""
    mesh_orphan_timeout: float = 60.0
    """Seconds that an agent keeps its procs when it hears nothing from the controller: the lease."""
    host_join_timeout: float = 60.0
    """Seconds that a new local host agent may take to report."""
    proc_start_timeout: float = 60.0
    """Seconds that a spawned proc may take to report; loading a zygote's preloaded modules does not count."""
    preload_timeout: float = 300.0
    """Seconds that a zygote may take to import what it preloads; then procs import it themselves."""
    process_exit_timeout: float = 5.0
    """Seconds that a stopped proc may take to end before it is killed."""
    cleanup_timeout: float = 3.0
    """Seconds that an actor's ``__cleanup__`` may take."""
    preload: str = ""
    """Comma-separated modules that a zygote imports before it forks procs (``torch`` saves each proc seconds)."""
    runtime_dir: str = ""
    """Folder for Unix sockets; empty: one in ``$XDG_RUNTIME_DIR`` or ``/tmp``. Paths may not exceed 107 characters."""
    stderr_tail_lines: int = 20
    """Lines of a proc's stderr that a failure report quotes."""
    log_dir: str = ""
    """Folder where an agent writes one log file per proc; empty: lines go to the agent's own output, prefixed."""
    max_frame_length: int = 10 * 2**30
    """Bytes that one frame of a message may have."""


_KINDS: dict[str, type] = {field.name: type(field.default) for field in dataclasses.fields(_Settings)}
_MAY_BE_ZERO = {"stderr_tail_lines"}


def _check(name: str, value: Any, where: str) -> Any:
    if isinstance(value, str):
        return value
    lowest = 0 if name in _MAY_BE_ZERO else math.ulp(0.0)
    if not (lowest <= value < math.inf):
        raise ConfigError(f"{where}: a finite number {'of 0 or more' if lowest == 0 else 'above 0'} expected")
    return value


def _from_environment() -> dict[str, Any]:
    found = {}
    for name, kind in _KINDS.items():
        text = os.environ.get(_ENV_PREFIX + name.upper())
        if text is not None:
            where = f"{_ENV_PREFIX}{name.upper()}={text!r}"
            try:
                value = kind(text)
            except ValueError:
                raise ConfigError(f"{where}: {kind.__name__} expected") from None
            found[name] = _check(name, value, where)
    return found


_runtime: dict[str, Any] = {}


def settings() -> _Settings:
    """Return the settings in force now.

    Raises:
        ConfigError: the environment holds one that cannot be used.
    """
    return _Settings(**{**_from_environment(), **_runtime})


def configure(**values: Any) -> None:
    """Change settings of this process.

    Raises:
        ConfigError: there is no setting of that name, or it cannot have that value.
        TypeError: the value has the wrong type.
    """
    checked = {}
    for name, given in values.items():
        kind = _KINDS.get(name)
        if kind is None:
            raise ConfigError(f"unknown setting {name!r}; there are: {', '.join(sorted(_KINDS))}")
        value = float(given) if kind is float and type(given) is int else given
        if type(value) is not kind:
            raise TypeError(f"setting {name!r} must be {kind.__name__}, not {type(given).__name__}")
        checked[name] = _check(name, value, f"setting {name!r}={value!r}")
    _runtime.update(checked)


@contextlib.contextmanager
def configured(**values: Any) -> Iterator[dict[str, Any]]:
    """Change settings inside a ``with`` block; yields all settings in force there."""
    before = dict(_runtime)
    configure(**values)
    try:
        yield get_global_config()
    finally:
        _runtime.clear()
        _runtime.update(before)


def get_global_config() -> dict[str, Any]:
    """Return every setting with the value in force."""
    return dataclasses.asdict(settings())


def get_runtime_config() -> dict[str, Any]:
    """Return what `configure` set."""
    return dict(_runtime)


def clear_runtime_config() -> None:
    """Forget what `configure` set."""
    _runtime.clear()
