from __future__ import annotations

from collections.abc import Iterator

import pytest

from monarch_slurm.config import (
    clear_runtime_config,
    configure,
    configured,
    get_global_config,
    get_runtime_config,
    settings,
)
from monarch_slurm.errors import ConfigError, MonarchSlurmError


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
    assert get_runtime_config() == {"heartbeat_interval": 4.0}
    assert get_global_config()["heartbeat_interval"] == 4.0
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
        ({"heartbeat": 1}, ConfigError, "unknown setting 'heartbeat'; there are: cleanup_timeout"),
        ({"heartbeat_interval": "1"}, TypeError, "must be float, not str"),
        ({"heartbeat_interval": True}, TypeError, "must be float, not bool"),
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
