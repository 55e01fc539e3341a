"""TorchFT's own Lighthouse, and what is done to its manager; `test_engine` has the rest, in real runs."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from monarch_slurm.collectives.errors import ProofError
from monarch_slurm.errors import ConfigError
from monarch_slurm.train.config import Place, TrainConfig
from monarch_slurm.train.fault_tolerance import QuorumError, ReplicaManager, start_lighthouse
from monarch_slurm.train.replica import open_replica
from monarch_slurm.train.transfer import StateTransport, UntrustedStateError

CONFIG = TrainConfig(replicas=2)


def test_lighthouse_is_reached_by_address() -> None:
    server, url = start_lighthouse("127.0.0.2", CONFIG)
    assert url.startswith("http://127.0.0.2:")
    from torchft.coordination import LighthouseClient

    client = LighthouseClient(url, connect_timeout=timedelta(seconds=5))
    client.heartbeat("somebody")
    server.shutdown()


@pytest.mark.parametrize(
    ("address", "text"),
    [("0.0.0.0", "one address"), ("192.0.2.1", "cannot listen on"), ("node-1", "not an IP address")],
)
def test_lighthouse_without_a_usable_address(address: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        start_lighthouse(address, CONFIG)


def test_a_lighthouse_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch_slurm.train.fault_tolerance._CONNECT_TIMEOUT", 0.2)
    place = Place(0, 0, 1, 0, "http://127.0.0.1:1")
    with pytest.raises(QuorumError, match=r"cannot reach the Lighthouse.*127\.0\.0\.1:1"):
        ReplicaManager(CONFIG, place, open_replica(place, 5.0), lambda *_, **__: None, lambda: None, {})


@pytest.mark.parametrize("lighthouse_dies", [False, True])
def test_a_replica_that_waits_for_a_quorum_can_do_something_else(lighthouse_dies: bool) -> None:
    config = dataclasses.replace(CONFIG, quorum_timeout=1.0)
    server, url = start_lighthouse("127.0.0.1", config)
    place = Place(0, 0, 1, 0, url)
    waited: list[str] = []
    manager = ReplicaManager(
        config,
        place,
        open_replica(place, 5.0),
        lambda *_, **__: None,
        lambda: None,
        {},
        lambda: waited.append(threading.current_thread().name),
    )
    if lighthouse_dies:
        server.shutdown()
    with pytest.raises(QuorumError, match="got no quorum"):  # there is nobody else
        manager.start_quorum()
    assert len(waited) > 3
    assert len(set(waited)) == 1
    manager.close()
    server.shutdown()


def test_one_line_per_failed_sync(caplog: pytest.LogCaptureFixture) -> None:
    server, url = start_lighthouse("127.0.0.1", CONFIG)
    place = Place(0, 0, 1, 0, url)
    manager = ReplicaManager(CONFIG, place, open_replica(place, 5.0), lambda *_, **__: None, lambda: None, {})
    logger = logging.getLogger("torchft.manager")
    with caplog.at_level(logging.WARNING, logger="torchft.manager"):
        for _ in range(10):
            logger.error("got exception in future: reset by peer\nwith more below", exc_info=ConnectionError())
        logger.warning("Unable to reset NCCL flight recorder recording so traces will be incorrect.")
        logger.warning("something else")
    assert caplog.messages == ["got exception in future: reset by peer", "something else"]
    assert all(record.exc_info is None for record in caplog.records)
    manager.close()
    server.shutdown()


def test_servers_of_torchft_take_free_ports_of_the_range() -> None:
    from monarch_slurm.config import configured
    from monarch_slurm.wire.ports import listen_tcp

    with listen_tcp("127.0.0.1", 1) as taken:
        port = int(taken.getsockname()[1])
        with configured(port_range=f"{port}-{port + 20}"):
            servers = [start_lighthouse("127.0.0.1", TrainConfig()) for _ in range(2)]
    ports = {int(url.rpartition(":")[2]) for _, url in servers}
    assert len(ports) == 2
    assert ports <= set(range(port + 1, port + 21))
    for server, _ in servers:
        server.shutdown()


def test_a_state_that_is_not_the_announced_one_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    server, url = start_lighthouse("127.0.0.1", CONFIG)
    places = [Place(0, 0, 1, 0, url), Place(1, 0, 1, 0, url)]
    replicas = [open_replica(place, 5.0) for place in places]
    donor, joiner = managers = [
        ReplicaManager(CONFIG, place, replica, lambda *_, **__: None, lambda: None, {})
        for place, replica in zip(places, replicas, strict=True)
    ]
    loaded: list[float] = []
    donor.register_state_dict_fn("w", lambda _: None, lambda: [5.0])
    joiner.register_state_dict_fn("w", loaded.extend, lambda: [1.0])
    donor._step = 7
    expect = StateTransport.expect

    def expect_another(
        self: StateTransport, step: int, member: str, key: bytes, announced: Callable[[], str] | None, donor: str
    ) -> None:
        expect(self, step, member, key, lambda: "f" * 64, donor)

    monkeypatch.setattr(StateTransport, "expect", expect_another)
    with ThreadPoolExecutor(1) as pool:
        sync = pool.submit(donor.start_quorum)
        with pytest.raises(UntrustedStateError, match=r"step 7 that replica rank 1 got from replica rank 0 .*ffff"):
            joiner.start_quorum()
        sync.result()
    assert loaded == []
    assert joiner.current_step() == 0
    for manager in managers:
        manager.close()
    server.shutdown()


def test_a_quorum_without_proofs_costs_a_sync_and_too_many_in_a_row_end_the_trainer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server, url = start_lighthouse("127.0.0.1", CONFIG)
    places = [Place(0, 0, 1, 0, url), Place(1, 0, 1, 0, url)]
    replicas = [open_replica(place, 5.0) for place in places]
    managers = [
        ReplicaManager(CONFIG, place, replica, lambda *_, **__: None, lambda: None, {})
        for place, replica in zip(places, replicas, strict=True)
    ]
    for manager in managers:
        manager.register_state_dict_fn("w", lambda _: None, lambda: [1.0])

    def sync(manager: ReplicaManager) -> bool:
        manager.start_quorum()
        return manager.should_commit()

    def sync_all() -> list[bool | BaseException]:
        with ThreadPoolExecutor(2) as pool:
            syncs = [pool.submit(sync, manager) for manager in managers]
            errors = [each.exception() for each in syncs]
            return [error or each.result() for error, each in zip(errors, syncs, strict=True)]

    with monkeypatch.context() as strangers:
        strangers.setattr("monarch_slurm.train.group.agree_on_secret", lambda store: os.urandom(32))
        assert sync_all() == [False, False]
    (logged,) = [text for text in caplog.messages if "did not prove" in text]  # one line; both share this process
    assert re.search(r"replica_00000\d at 127\.0\.0\.1 on \S+ left quorum \d+: rank \d of 2 did not prove", logged)
    assert sync_all() == [True, True]
    monkeypatch.setattr("monarch_slurm.train.group.agree_on_secret", lambda store: os.urandom(32))
    monkeypatch.setattr("monarch_slurm.train.fault_tolerance._UNPROVED_QUORUMS", 3)
    for manager in managers:
        manager._quorum_id = -1  # the members are the same, and would keep the group
    ended: set[int] = set()
    for _ in range(20):  # a connection that the other end has closed first is no missing proof
        outcomes = sync_all()
        assert True not in outcomes
        ended |= {i for i, outcome in enumerate(outcomes) if isinstance(outcome, ProofError)}
        if len(ended) == 2:
            break
    assert ended == {0, 1}
    assert "quorums end" in str(next(outcome for outcome in outcomes if isinstance(outcome, ProofError)))
    for manager in managers:
        manager.close()
    server.shutdown()
