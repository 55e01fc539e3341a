from __future__ import annotations

import ast
import asyncio
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import DEADLINE, REPOSITORY

from monarch_slurm.config import (
    Encoding,
    clear_runtime_config,
    configure,
    configured,
    get_global_config,
    get_runtime_config,
    parametrize_config,
    parametrize_config_pointwise,
    reload_config_from_env,
    reset_config_to_defaults,
    settings,
    warn_of_unknown_variables,
)
from monarch_slurm.errors import ConfigError, MonarchSlurmError
from monarch_slurm.host.worker_address import WorkerAddress
from monarch_slurm.monarch_keys import NOT_ZERO, VALUES
from monarch_slurm.transport import BindSpec, ChannelAddr, ChannelTransport


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    before = get_runtime_config()
    clear_runtime_config()
    yield
    clear_runtime_config()
    configure(**before)


def test_configure_wins_over_the_environment_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings().heartbeat_interval == 1.0
    monkeypatch.setenv("MONARCH_SLURM_HEARTBEAT_INTERVAL", "2.5")
    assert settings().heartbeat_interval == 2.5
    configure(heartbeat_interval=4)
    assert settings().heartbeat_interval == 4.0
    assert get_runtime_config() == {"heartbeat_interval": "4s"}
    assert get_global_config()["heartbeat_interval"] == "4s"
    clear_runtime_config()
    assert settings().heartbeat_interval == 2.5


def test_a_block_changes_settings_for_itself_only() -> None:
    configure(preload="torch")
    with configured(preload="numpy", missed_heartbeats=5) as inside:
        assert (inside["preload"], inside["missed_heartbeats"]) == ("numpy", 5)
        with configured(missed_heartbeats=7):
            assert settings().missed_heartbeats == 7
        assert settings().missed_heartbeats == 5
    assert get_runtime_config() == {"preload": "torch"}
    with pytest.raises(RuntimeError), configured(preload="x"):
        raise RuntimeError
    assert settings().preload == "torch"


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (
            {"heartbeat_intervall": 1},
            ConfigError,
            "unknown setting 'heartbeat_intervall'; did you mean heartbeat_inter",
        ),
        ({"xyzzy": 1}, ConfigError, r"unknown setting 'xyzzy'; monarch_slurm.config.get_global_config\(\) has all"),
        ({"heartbeat_interval": "1"}, TypeError, "Invalid duration format '1'"),
        ({"heartbeat_interval": True}, TypeError, "must be seconds or a text such as 30s, not bool"),
        ({"process_exit_timeout": None}, TypeError, "not NoneType"),
        ({"default_transport": "pigeon"}, ValueError, "unknown transport 'pigeon'; there are: tcp, ipc"),
        ({"default_transport": 5}, TypeError, "a ChannelTransport or a str expected"),
        ({"default_encoding": "Json"}, TypeError, "must be Encoding, not str"),
        ({"tokio_worker_threads": "4"}, TypeError, "must be int, not str"),
        ({"remote_alloc_allowed_port_range": (1, 2)}, TypeError, "must be slice, not tuple"),
        ({"missed_heartbeats": 1.5}, TypeError, "must be int, not float"),
        ({"preload": None}, TypeError, "must be str, not NoneType"),
        ({"heartbeat_interval": 0}, ConfigError, "a finite number above 0 expected"),
        ({"heartbeat_interval": float("nan")}, ConfigError, "a finite number above 0 expected"),
        ({"stderr_tail_lines": -1}, ConfigError, "a finite number of 0 or more expected"),
    ],
)
def test_values_that_cannot_be_used(values: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        configure(mesh_orphan_timeout=5.0, **values)
    assert get_runtime_config() == {}, "all or nothing"


@pytest.mark.parametrize("text", ["", "soon", "-1", "inf", "nan"])
def test_an_environment_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MONARCH_SLURM_MESH_ORPHAN_TIMEOUT", text)
    with pytest.raises(ConfigError, match=f"MONARCH_SLURM_MESH_ORPHAN_TIMEOUT='{text}'"):
        settings()
    assert issubclass(ConfigError, MonarchSlurmError)
    assert issubclass(ConfigError, ValueError)


def test_lengths_of_time_are_texts_or_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    with configured(cleanup_timeout="90s", process_exit_timeout=0.5) as inside:
        assert (inside["cleanup_timeout"], inside["process_exit_timeout"]) == ("1m 30s", "500ms")
        assert (settings().cleanup_timeout, settings().process_exit_timeout) == (90.0, 0.5)
    monkeypatch.setenv("MONARCH_SLURM_MESH_ORPHAN_TIMEOUT", "1h 30m")
    assert settings().mesh_orphan_timeout == 5400.0
    monkeypatch.setenv("MONARCH_SLURM_MESH_ORPHAN_TIMEOUT", "none")
    assert settings().mesh_orphan_timeout is None
    assert get_global_config()["mesh_orphan_timeout"] is None


def test_every_setting_can_be_given_back() -> None:
    everything = get_global_config()
    configure(**everything)
    assert get_runtime_config() == everything


def test_settings_that_have_another_name_in_monarch(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(codec_max_frame_length=2**20)
    assert settings().max_frame_length == 2**20
    assert get_runtime_config() == {"codec_max_frame_length": 2**20, "max_frame_length": 2**20}
    monkeypatch.setenv("MONARCH_SLURM_MESH_PROC_SPAWN_MAX_IDLE", "7s")
    assert settings().proc_start_timeout == 7.0
    monkeypatch.setenv("MONARCH_SLURM_PROC_START_TIMEOUT", "8s")
    assert settings().proc_start_timeout == 8.0


def test_settings_of_monarch_without_a_meaning_here_are_kept() -> None:
    assert get_global_config()["message_delivery_timeout"] == "30s"
    with configured(
        message_delivery_timeout="1m",
        default_encoding=Encoding.Json,
        remote_alloc_allowed_port_range=slice(1, 5),
        tokio_worker_threads=4,
    ) as inside:
        assert inside["message_delivery_timeout"] == "1m"
        assert inside["default_encoding"] is Encoding.Json
        assert inside["remote_alloc_allowed_port_range"] == slice(1, 5)
        assert inside["tokio_worker_threads"] == 4
    assert get_runtime_config() == {}


def test_transports() -> None:
    assert get_global_config()["default_transport"] == BindSpec(ChannelTransport.Unix)
    for given, spec in [
        ("tcp", BindSpec(ChannelTransport.TcpWithHostname)),
        (ChannelTransport.Local, BindSpec(ChannelTransport.Local)),
        ("tcp://[::1]:0", BindSpec(ChannelTransport.TcpWithHostname, "tcp://[::1]:0")),
    ]:
        with configured(default_transport=given) as inside:
            assert inside["default_transport"] == spec
            assert BindSpec.of(settings().default_transport) == spec
    assert BindSpec.of("tcp://[::1]:0").host == "::1"
    assert BindSpec.of("unix").host == ""


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("HEARTBEAT_INTERVALL", "is no setting; did you mean MONARCH_SLURM_HEARTBEAT_INTERVAL?"),
        ("QQQQ", "MONARCH_SLURM_QQQQ is no setting$"),
    ],
)
def test_an_unknown_variable_is_told_once(monkeypatch: pytest.MonkeyPatch, variable: str, hint: str) -> None:
    monkeypatch.setenv(f"MONARCH_SLURM_{variable}", "2")
    with pytest.warns(UserWarning, match=hint) as told:
        warn_of_unknown_variables()
    assert len(told) == 1


def test_every_variable_of_this_package_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in [*REPOSITORY.glob("monarch_slurm/**/*.py"), *REPOSITORY.glob("tests/**/*.py")]:
        for name in re.findall(r'"(MONARCH_SLURM_[A-Z_]*[A-Z])[="]', path.read_text()):
            if not name.endswith(("QQQQ", "INTERVALL")):
                monkeypatch.setenv(name, "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_unknown_variables()


OTHER_DEFAULTS = {"rdma_max_chunk_size_mb": 4}
"""Settings whose defaults are deliberately not Monarch's; `site/monarch.md` says why."""


@pytest.mark.parametrize("line", (REPOSITORY / "tests/monarch_defaults.txt").read_text().splitlines())
def test_defaults_are_those_recorded_from_monarch(line: str) -> None:
    name, _, text = line.partition(" ")
    ours = get_global_config()[name]
    if isinstance(ours, BindSpec | Encoding):
        ours = str(ours) if isinstance(ours, BindSpec) else ours.name
    assert ours == OTHER_DEFAULTS.get(name, ast.literal_eval(text))


@pytest.mark.parametrize("name", NOT_ZERO)
def test_numbers_that_must_be_above_0(name: str) -> None:
    configure(**{name: 1})
    for number in (0, -1):
        with pytest.raises(ConfigError, match=f"setting '{name}'={number}: a finite number above 0 expected"):
            configure(**{name: number})


@pytest.mark.parametrize("name", [name for name, value in VALUES.items() if type(value) is int])
def test_no_number_may_be_negative(name: str) -> None:
    with pytest.raises(ConfigError, match=f"setting '{name}'=-1: a finite number"):
        configure(**{name: -1})


ALL_COMBINATIONS = """
import pytest
from monarch_slurm.config import parametrize_config, settings

@parametrize_config(missed_heartbeats=[5, 6], preload=["numpy", "torch"])
@pytest.mark.parametrize("number", [1])
def test_some(number):
    print("ran", number, settings().missed_heartbeats, settings().preload)

def test_after():
    print("after", settings().missed_heartbeats, settings().preload or "nothing")
"""


def test_all_combinations_are_run(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(ALL_COMBINATIONS)
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "--rootdir", ".", "test_some.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = re.findall(r"ran (\d \d \w+)", done.stdout)
    assert sorted(runs) == ["1 5 numpy", "1 5 torch", "1 6 numpy", "1 6 torch"]
    assert "after 3 nothing" in done.stdout


def cases(test: Any) -> list[tuple[str, object]]:
    (mark,) = test.pytestmark
    return [(name, test(case)) for name, case in zip(mark.kwargs["ids"], mark.args[1], strict=True)]


def test_settings_point_by_point() -> None:
    @parametrize_config_pointwise(missed_heartbeats=[5, 6], preload=["numpy", "torch"])
    def plain() -> tuple[int, str]:
        return settings().missed_heartbeats, settings().preload

    assert cases(plain) == [
        ("missed_heartbeats=5-preload=numpy", (5, "numpy")),
        ("missed_heartbeats=6-preload=torch", (6, "torch")),
    ]

    @parametrize_config_pointwise(missed_heartbeats=[5, 6])
    async def asynchronous() -> int:
        return settings().missed_heartbeats

    assert [asyncio.run(run) for _, run in cases(asynchronous)] == [5, 6]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one setting"):
        parametrize_config()
    with pytest.raises(ValueError, match=r"the same number of values .*\{'preload': 1, 'log_dir': 2\}"):
        parametrize_config_pointwise(preload=["x"], log_dir=["y", "z"])


def test_defaults_without_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_SLURM_PRELOAD", "numpy")
    configure(missed_heartbeats=7)
    reset_config_to_defaults()
    try:
        assert (settings().preload, settings().missed_heartbeats) == ("", 3)
    finally:
        reload_config_from_env()
    assert (settings().preload, settings().missed_heartbeats) == ("numpy", 3)


def test_addresses_of_transports() -> None:
    assert BindSpec("tcp") == BindSpec(ChannelTransport.TcpWithHostname)
    assert BindSpec("tcp://h:1").host == "h"
    with pytest.raises(ValueError, match="unknown transport"):
        BindSpec("pigeon")
    for transport in (
        ChannelTransport.Unix, ChannelTransport.Local, ChannelTransport.TcpWithLocalhost,
        ChannelTransport.TcpWithHostname,
    ):  # fmt: skip
        address = ChannelAddr.any(transport)
        assert WorkerAddress.parse(address).dial != WorkerAddress.parse(ChannelAddr.any(transport)).dial
    with pytest.raises(NotImplementedError, match="nothing listens at tls"):
        ChannelAddr.any(ChannelTransport.Tls)
