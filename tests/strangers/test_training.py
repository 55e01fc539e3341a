"""Another user of the node attacks a training run: nothing learnt, changed or stopped, and one line says who it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import socket_folders, wait_until
from victims import STRANGER, Training, attack, family, listeners, only_root, unlisted

pytestmark = [pytest.mark.slow, pytest.mark.train, only_root]


def test_what_listens_is_listed_on_the_page(training: Training) -> None:
    found = listeners(family(training.process.pid))
    assert {listener.process for listener in found} >= {"controller", "trainer"}
    assert unlisted(found) == []


def test_another_user_of_the_node_changes_nothing(training: Training) -> None:
    pids = family(training.process.pid)
    before = len(training.events())
    assert attack(listeners(pids), pids, [training.out.parent, *map(Path, socket_folders())]) == {}

    attacked = len(training.events())
    wait_until(lambda: len(training.syncs(attacked)) >= 2 * training.replicas, "the run to commit more syncs", 120)
    assert training.failures() == []
    assert {(item["committed"], item["participants"]) for item in training.syncs(before)} == {(True, training.replicas)}
    lines = [line for line in training.text().splitlines() if "refused" in line]
    assert any("the state transfer" in line and f"uid {STRANGER}" in line for line in lines), lines
    assert len(lines) < 30, "a line in ten seconds for each listener"
