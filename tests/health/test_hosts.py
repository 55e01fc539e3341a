"""All hosts of a mesh are examined at once; one that is silent is a finding and holds nobody up."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from job_agents import Agent
from support import DEADLINE

from monarch_slurm.actor import MeshFailure
from monarch_slurm.controller import gather_hosts, publish
from monarch_slurm.health import check_hosts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    publish(tmp_path / "job", address="127.0.0.1")
    return tmp_path / "job"


def test_hosts_answer(folder: Path, agents: Callable[..., Agent]) -> None:
    for name in ("one", "other"):
        agents(folder, name)
    hosts = gather_hosts(["one", "other"], timeout=DEADLINE)
    findings, answers = check_hosts(hosts, seconds=DEADLINE)
    assert sorted(answers) == ["one", "other"]
    assert {finding.host for finding in findings} == {"one", "other"}
    assert not [finding for finding in findings if finding.check == "answer"]


def test_a_stopped_host_is_found_and_fails_nobody(
    folder: Path, agents: Callable[..., Agent], failures: list[MeshFailure]
) -> None:
    agents(folder, "one")
    stopped = agents(folder, "other")
    hosts = gather_hosts(["one", "other"], timeout=DEADLINE)
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        findings, answers = check_hosts(hosts, seconds=DEADLINE)
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    assert list(answers) == ["one"]
    (silent,) = [finding for finding in findings if finding.check == "answer"]
    assert (silent.host, silent.level) == ("other", "bad")
    _, answers = check_hosts(hosts.slice(hosts=0), seconds=DEADLINE)
    assert list(answers) == ["one"]
    assert not failures
