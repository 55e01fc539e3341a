"""Settings of this process: defaults, then the environment, then `configure`.

A client's settings reach the host agents that it starts and the procs that those spawn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
    stderr_tail_lines: int = 40
    """Lines of a proc's stderr that a failure report quotes."""
    log_dir: str = ""
    """Folder where an agent writes one log file per proc; empty: lines go to the agent's own output, prefixed."""
    max_frame_length: int = 10 * 2**30
    """Bytes that one frame of a message may have."""


def _parse(name: str, text: str) -> Any:
    kind = type(getattr(_Settings, name))
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{_ENV_PREFIX}{name.upper()}={text!r}: {kind.__name__} expected") from None


def _from_environment() -> dict[str, Any]:
    found = {}
    for field in dataclasses.fields(_Settings):
        text = os.environ.get(_ENV_PREFIX + field.name.upper())
        if text is not None:
            found[field.name] = _parse(field.name, text)
    return found


_runtime: dict[str, Any] = {}


def settings() -> _Settings:
    """Return the settings in force now."""
    return _Settings(**{**_from_environment(), **_runtime})


def configure(**values: Any) -> None:
    """Change settings of this process.

    Raises:
        ValueError: there is no setting of that name.
        TypeError: the value has the wrong type.
    """
    fields = {field.name for field in dataclasses.fields(_Settings)}
    for name, value in values.items():
        if name not in fields:
            raise ValueError(f"unknown setting {name!r}; there are: {', '.join(sorted(fields))}")
        kind = type(getattr(_Settings, name))
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not kind:
            raise TypeError(f"setting {name!r} must be {kind.__name__}, not {type(value).__name__}")
        _runtime[name] = value


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
