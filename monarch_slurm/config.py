"""Settings of this process: defaults, then the environment, then `configure`.

A client's settings reach the host agents that it starts and the procs that those spawn. Lengths of time are seconds, or
texts such as ``30s`` and ``1h 30m``; they are given back as texts. Every key of Monarch's configuration is taken
(`monarch_slurm.monarch_keys`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from monarch_slurm.durations import format_duration, parse_duration
from monarch_slurm.errors import ConfigError
from monarch_slurm.monarch_keys import ALIASES, DURATIONS, NOT_ZERO, NUMBERS_OR_NONE, VALUES, Encoding
from monarch_slurm.transport import BindSpec, ChannelTransport

__all__ = [
    "ChannelTransport",
    "Encoding",
    "clear_runtime_config",
    "configure",
    "configured",
    "get_global_config",
    "get_runtime_config",
    "parametrize_config",
    "parametrize_config_pointwise",
    "reload_config_from_env",
    "reset_config_to_defaults",
    "settings",
    "warn_of_unknown_variables",
]

_ENV_PREFIX = "MONARCH_SLURM_"

_VARIABLES = {
    "ADDRESS", "ALLOW_UNAUTHENTICATED", "BATCH_VARIABLES", "CCL_LIBRARY", "CUDA_HEADERS", "GPU_LIBRARY", "GPU_PLATFORM",
    "HIP_HEADERS", "JOB_FOLDER", "KILL_WAIT", "NATIVE_BUILD", "NATIVE_CACHE", "NATIVE_SANITIZE", "NATIVE_STRICT",
    "NCCL_HEADERS", "PRELOAD_PATH", "PROC", "PROC_SPEC", "PYTHONPATH", "SUPERVISED", "TEST_HARDWARE", "TEST_NCCL",
    "TEST_NO_RDMA", "TEST_TORCHTITAN", "TEST_NO_SLURM", "TEST_RDMA", "WORKER_KEY",
}  # fmt: skip
"""Ends of the names of environment variables that are not settings."""

Seconds: TypeAlias = float


@dataclass
class _Settings:
    heartbeat_interval: Seconds = 1.0
    """Seconds between two heartbeats of a host agent and the controller."""
    missed_heartbeats: int = 3
    """A host on another machine is lost after this many intervals in which its machine has not answered."""
    unresponsive_agent_timeout: Seconds = 60.0
    """Seconds that an agent may say nothing (it is busy, stopped or swapped out) while its machine answers."""
    mesh_orphan_timeout: Seconds | None = 60.0
    """Seconds that an agent keeps its procs when it hears nothing from the controller: the lease. None: for ever."""
    host_spawn_ready_timeout: Seconds = 30.0
    """Seconds that the host agent of this machine, or of a worker that has accepted, may take to join."""
    host_join_timeout: Seconds = 60.0
    """Seconds that the host agents of a job may take to join: all its nodes start Python from one file system."""
    proc_start_timeout: Seconds = 30.0
    """Seconds that a spawned proc may take to report; loading a zygote's preloaded modules does not count."""
    preload_timeout: Seconds = 300.0
    """Seconds that a zygote may take to import what it preloads; then procs import it themselves."""
    process_exit_timeout: Seconds = 10.0
    """Seconds that a stopped proc may take to end before it is killed."""
    stop_actor_timeout: Seconds = 10.0
    """Seconds that a stopped actor may take to end, with all that was sent to it before, before it is interrupted."""
    mesh_terminate_timeout: Seconds = 10.0
    """Seconds that the procs of hosts which are shut down may take to end before they are killed."""
    mesh_attach_config_timeout: Seconds = 60.0
    """Seconds that `monarch_slurm.actor.attach_to_workers` waits for the workers."""
    cleanup_timeout: Seconds = 3.0
    """Seconds that an actor's ``__cleanup__`` may take."""
    preload: str = ""
    """Comma-separated modules that a zygote imports before it forks procs (``torch`` saves each proc seconds)."""
    port_range: str = ""
    """Ports to listen on, such as ``40000-40999``; empty: ephemeral ones. Gloo and NCCL choose their own."""
    runtime_dir: str = ""
    """Folder for Unix sockets; empty: one in ``$XDG_RUNTIME_DIR`` or ``/tmp``. Paths may not exceed 107 characters."""
    stderr_tail_lines: int = 20
    """Lines of a proc's stderr that a failure report quotes."""
    log_dir: str = ""
    """Folder where an agent writes one log file per proc; empty: lines go to the agent's own output, prefixed."""
    max_frame_length: int = 10 * 2**30
    """Bytes that one buffer of an argument or a result, or all the rest of it, may have."""
    max_cast_fanout: int = 16
    """Hosts that a call is sent to by one: calls on more go down a tree of hosts, of this fan-out."""
    direct_link_after: int = 8
    """Calls of one process after which it is connected with a proc of its host directly; 0: never."""
    default_transport: str = "unix"
    """Monarch's choice of a transport. Of ``tcp://host:port``, attached workers are told to dial that host."""
    rdma_transports: str = "local,shm,process_vm,gpu_ipc,ibverbs,tcp"
    """Comma-separated ways of transfer that may be used; their order is fixed: best first."""
    rdma_allow_tcp_fallback: bool = True
    """Use TCP where two hosts have no RDMA device in common."""
    rdma_disable_ibverbs: bool = False
    """Leave RDMA devices alone."""
    rdma_ibverbs_target: str = ""
    """``nic:<name>`` or ``nic:<name>:<port>`` takes this device; ``cpu:<NUMA node>`` and ``gpu:<index on the host>``
    the nearest to these; empty takes the best one."""
    rdma_max_chunk_size_mb: int = 4
    """Megabytes (2**20 bytes) of one chunk; a transfer is cut into chunks."""
    rdma_tcp_streams: int = 4
    """TCP connections to one peer."""
    rdma_tcp_threads: int = 2
    """Threads that serve peers' TCP connections."""
    rdma_qps_per_peer: int = 4
    """Queue pairs to one peer."""
    rdma_registration_cache_mb: int = 16384
    """Megabytes of local memory that stay registered with a device after a transfer; 0 keeps none."""


@dataclass(frozen=True)
class _Key:
    """One setting: the type of its values, whether they are lengths of time, and whether None is one, too."""

    kind: type
    default: Any
    duration: bool = False
    optional: bool = False

    def check(self, value: Any, where: str) -> Any:
        """Return ``value`` as it is stored.

        Raises:
            ConfigError: it cannot be used.
            TypeError: it has the wrong type.
        """
        if value is None and self.optional:
            return None
        if self.duration and isinstance(value, str):
            try:
                value = parse_duration(value)
            except ValueError as error:
                raise TypeError(f"{where}: {error}") from None
        if self.kind is float and type(value) is int:
            value = float(value)
        if type(value) is not self.kind:
            raise TypeError(f"{where} must be {self.expected}, not {type(value).__name__}")
        return value

    def parse(self, text: str) -> Any:
        """Return the value that ``text``, of an environment variable, means.

        Raises:
            ValueError: it means none.
        """
        if self.optional and text.lower() == "none":
            return None
        if self.kind is bool:
            return _BOOLEANS[text.lower()]
        if self.kind is slice:
            first, _, last = text.partition(":")
            return slice(int(first), int(last))
        if self.kind is Encoding:
            return Encoding(text)
        if self.duration:
            with contextlib.suppress(ValueError):
                return float(text)
            return parse_duration(text)
        return self.kind(text)

    @property
    def expected(self) -> str:
        """What a value must be, for people."""
        return "seconds or a text such as 30s" if self.duration else self.kind.__name__


_BOOLEANS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
_ACTING: dict[str, _Key] = {
    field.name: _Key(
        type(field.default), field.default, str(field.type).startswith("Seconds"), "None" in str(field.type)
    )
    for field in dataclasses.fields(_Settings)
}
_KEYS: dict[str, _Key] = {
    **{name: _Key(float, parse_duration(text), duration=True) for name, text in DURATIONS.items()},
    **{name: _Key(type(value), value) for name, value in VALUES.items()},
    **{name: _Key(int, None, optional=True) for name in NUMBERS_OR_NONE},
    **_ACTING,
}
_MAY_BE_ZERO = {"direct_link_after", "stderr_tail_lines", "rdma_registration_cache_mb"}


def _checked(name: str, given: Any, where: str) -> Any:
    value = _KEYS[name].check(str(BindSpec.of(given)) if name == "default_transport" else given, where)
    if type(value) is int or (name in _ACTING and type(value) is float):
        may_be_zero = name in _MAY_BE_ZERO if name in _ACTING else name not in NOT_ZERO
        if not (0 <= value < math.inf) or (value == 0 and not may_be_zero):
            raise ConfigError(f"{where}: a finite number {'of 0 or more' if may_be_zero else 'above 0'} expected")
    return value


def _from_environment() -> dict[str, Any]:
    found: dict[str, Any] = {}
    if _ignores_environment:
        return found
    for variable in os.environ:
        if not variable.startswith(_ENV_PREFIX):
            continue
        spelling = variable.removeprefix(_ENV_PREFIX).lower()
        name = ALIASES.get(spelling, spelling)
        if name not in _KEYS or (name != spelling and name in found):  # of two names for one setting, ours counts
            continue
        where = f"{variable}={os.environ[variable]!r}"
        try:
            value = _KEYS[name].parse(os.environ[variable])
        except (ValueError, KeyError):
            raise ConfigError(f"{where}: {_KEYS[name].expected} expected") from None
        found[name] = _checked(name, value, where)
    return found


_MONARCH_NAMES = {ours: theirs for theirs, ours in ALIASES.items()}
_runtime: dict[str, Any] = {}
_revision = 0
_ignores_environment = False


def settings() -> _Settings:
    """Return the settings in force now.

    Raises:
        ConfigError: the environment holds one that cannot be used.
    """
    return _Settings(**{name: value for name, value in {**_from_environment(), **_runtime}.items() if name in _ACTING})


def configure(**values: Any) -> None:
    """Change settings of this process.

    Raises:
        ConfigError: there is no setting of that name, or it cannot have that value.
        TypeError: the value has the wrong type.
    """
    checked = {}
    for given_name, given in values.items():
        name = ALIASES.get(given_name, given_name)
        if name not in _KEYS:
            raise ConfigError(
                f"unknown setting {given_name!r}{_did_you_mean(given_name)}; "
                "monarch_slurm.config.get_global_config() has all"
            )
        checked[name] = _checked(name, given, f"setting {given_name!r}={given!r}")
    _change(checked)


def revision() -> int:
    """Return a number that changes when `configure` and the like change something: what was derived is out of date."""
    return _revision


def _change(values: dict[str, Any]) -> None:
    global _revision
    _runtime.update(values)
    _revision += 1


@contextlib.contextmanager
def configured(**values: Any) -> Iterator[dict[str, Any]]:
    """Change settings inside a ``with`` block; yields all settings in force there."""
    before = dict(_runtime)
    configure(**values)
    try:
        yield get_global_config()
    finally:
        _runtime.clear()
        _change(before)


def get_global_config() -> dict[str, Any]:
    """Return every setting with the value in force."""
    defaults = {name: key.default for name, key in _KEYS.items()}
    return _shown({**defaults, **_from_environment(), **_runtime})


def get_runtime_config() -> dict[str, Any]:
    """Return what `configure` set."""
    return _shown(_runtime)


def clear_runtime_config() -> None:
    """Forget what `configure` set."""
    _runtime.clear()
    _change({})


def reset_config_to_defaults() -> None:
    """Forget what `configure` set and leave the environment out of account until `reload_config_from_env`; for
    tests.
    """
    global _ignores_environment
    _ignores_environment = True
    clear_runtime_config()


def reload_config_from_env() -> None:
    """Take the environment into account again, after `reset_config_to_defaults`. Otherwise it always is."""
    global _ignores_environment
    _ignores_environment = False
    _change({})


Parametrizing: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


def parametrize_config(**config_options: Iterable[Any]) -> Parametrizing:
    """Return a decorator that has pytest run a test, sync or async, under each combination of the given values.

    Raises:
        ValueError: no setting is given.
    """
    return _parametrize(config_options, itertools.product(*config_options.values()))


def parametrize_config_pointwise(**config_options: Sequence[Any]) -> Parametrizing:
    """Return a decorator that has pytest run a test, sync or async, with the first value of each setting, then with the
    second, and so on.

    Raises:
        ValueError: no setting is given, or not the same number of values for each.
    """
    lengths = {name: len(values) for name, values in config_options.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the same number of values for each setting expected, not {lengths}")
    return _parametrize(config_options, zip(*config_options.values(), strict=True))


def _parametrize(options: Mapping[str, Any], combinations: Iterable[tuple[Any, ...]]) -> Parametrizing:
    import pytest

    if not options:
        raise ValueError("at least one setting expected, such as prefix_with_rank=[True, False]")
    cases = [dict(zip(options, values, strict=True)) for values in combinations]
    names = ["-".join(f"{name}={value}" for name, value in case.items()) for case in cases]

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(test)
        def under_settings(_config_overrides: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            with configured(**_config_overrides):
                return test(*args, **kwargs)

        @functools.wraps(test)
        async def under_settings_async(_config_overrides: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            with configured(**_config_overrides):
                return await test(*args, **kwargs)

        wrapped: Any = under_settings_async if inspect.iscoroutinefunction(test) else under_settings
        signature = inspect.signature(test)
        overrides = inspect.Parameter("_config_overrides", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        wrapped.__signature__ = signature.replace(parameters=[overrides, *signature.parameters.values()])
        marked: Callable[..., Any] = pytest.mark.parametrize("_config_overrides", cases, ids=names)(wrapped)
        return marked

    return decorate


def warn_of_unknown_variables() -> None:
    """Warn of environment variables that look like settings and are none."""
    known = {name.upper() for name in (*_KEYS, *ALIASES)} | _VARIABLES
    for variable in sorted(os.environ):
        name = variable.removeprefix(_ENV_PREFIX)
        if name != variable and name not in known:
            hint = _did_you_mean(name.lower(), str.upper, _ENV_PREFIX)
            warnings.warn(f"the environment variable {variable} is no setting{hint}", UserWarning, stacklevel=2)


def _did_you_mean(name: str, spell: Callable[[str], str] = str, prefix: str = "") -> str:
    near = difflib.get_close_matches(name, [*_KEYS, *ALIASES], 1)
    return f"; did you mean {prefix}{spell(near[0])}?" if near else ""


def _shown(values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` as users see them: lengths of time as texts, Monarch's names beside ours."""
    shown = {}
    for name, value in values.items():
        if _KEYS[name].duration and value is not None:
            value = format_duration(value)
        if name == "default_transport":
            value = BindSpec.of(value)
        shown[name] = value
        if name in _MONARCH_NAMES:
            shown[_MONARCH_NAMES[name]] = value
    return shown
