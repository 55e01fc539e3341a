"""Native modules are built before a run trains, on every host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from job_agents import Agent
from support import DEADLINE

from monarch_slurm.actor import this_host
from monarch_slurm.controller import gather_hosts, publish
from monarch_slurm.native_build import built_native
from monarch_slurm.train.native_modules import MODULES, NativeModulesError, build_on_hosts

pytestmark = [pytest.mark.slow, pytest.mark.train]


def test_a_host_that_cannot_build_them_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agents: Callable[..., Agent]
) -> None:
    monkeypatch.setenv("MONARCH_SLURM_NATIVE_CACHE", str(tmp_path / "cache"))
    publish(tmp_path / "job", address="127.0.0.1")
    agents(tmp_path / "job", "one", {"CXX": "no-such-compiler"})
    hosts = gather_hosts(["one"], timeout=DEADLINE)
    with pytest.raises(NativeModulesError, match="--replica-backend ccl: CXX=no-such-compiler"):
        build_on_hosts(hosts)
    assert not list(tmp_path.rglob("*.so"))


def test_they_are_built_once(caplog: pytest.LogCaptureFixture) -> None:
    build_on_hosts(this_host())
    assert set(MODULES) <= built_native().keys()
    caplog.clear()
    build_on_hosts(this_host())
    assert "building" not in caplog.text
