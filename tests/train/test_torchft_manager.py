"""What is used of TorchFT's manager, and that it is still there."""

from __future__ import annotations

import types
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from monarch_slurm.train.config import TrainConfig
from monarch_slurm.train.fault_tolerance import start_lighthouse
from monarch_slurm.train.quorum_rules import Member, RankQuorum, for_rank, quorum_of
from monarch_slurm.train.torchft_manager import Manager, TorchftChangedError, check_torchft

import torchft.manager  # isort: skip - torchft reads its log level when it is first imported
from torchft.checkpointing import CheckpointTransport  # isort: skip
from torchft.process_group import ProcessGroupDummy  # isort: skip


class Quorums:
    """Forms quorums of one member."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str, int]] = []
        self.step = 0
        self.votes: list[bool] = []

    def ask(
        self, *, step: int, metadata: str, shrink_only: bool, commit_failures: int, timeout: timedelta
    ) -> tuple[RankQuorum, str]:
        self.asked.append((step, metadata, commit_failures))
        members = [Member("replica_0:0", step)]
        if self.step > step:  # another one is ahead
            members.append(Member("replica_1:0", self.step, metadata=("state of replica 1",)))
        return for_rank(quorum_of(tuple(members), None, 1, 1), "replica_0:0", 0), "state of replica 1"

    def should_commit(self, vote: bool, timeout: timedelta) -> bool:
        self.votes.append(vote)
        return vote


class Transport(CheckpointTransport):  # type: ignore[misc]
    """Notes what it is to fetch."""

    fetched: list[str]

    def metadata(self) -> str:
        return "mine"

    def send_checkpoint(self, *_: object, **__: object) -> None:
        raise AssertionError

    def disallow_checkpoint(self) -> None:
        pass

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> object:
        self.fetched = [*getattr(self, "fetched", []), metadata]
        return {"user": {"all": step}, "torchft": {"step": step, "batches_committed": 0}}

    def shutdown(self, wait: bool = True) -> None:
        pass


def listening() -> set[int]:
    return {
        connection.laddr.port
        for connection in psutil.Process().net_connections()
        if connection.status == psutil.CONN_LISTEN
    }


def make(quorums: Quorums | None, lighthouse: str = "", address: str = "127.0.0.1", store_port: int = 1) -> Manager:
    return Manager(
        quorums,
        address,
        ("127.0.0.1", store_port),
        lighthouse,
        pg=ProcessGroupDummy(0, 1),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        replica_id="replica_0",
        checkpoint_transport=Transport(),
        init_sync=False,
    )


def test_the_installed_torchft_is_one_that_can_be_used() -> None:
    check_torchft(torchft.manager)


def test_another_torchft_is_an_error_that_says_what_to_do() -> None:
    class Other:
        def __init__(self) -> None:
            self._manager = self._client = self._store = None

    with pytest.raises(TorchftChangedError, match=r"__init__ does not use TCPStore, ManagerServer.*pip install"):
        check_torchft(types.SimpleNamespace(Manager=Other))  # type: ignore[arg-type]


def test_nothing_of_torchft_listens(tmp_path: Path) -> None:
    before = listening()
    quorums = Quorums()
    manager = make(quorums)
    manager.register_state_dict_fn("all", lambda saved: None, lambda: 0)
    manager.start_quorum()
    assert manager.should_commit()
    assert (manager.current_step(), manager.num_participants()) == (1, 1)
    assert listening() == before
    assert (quorums.asked, quorums.votes) == ([(0, "mine", 0)], [True])
    manager.shutdown()


def test_a_state_is_fetched_from_where_the_quorum_says() -> None:
    quorums = Quorums()
    quorums.step = 7
    manager = make(quorums)
    loaded: list[object] = []
    manager.register_state_dict_fn("all", loaded.append, lambda: 0)
    manager.start_quorum()
    assert manager._checkpoint_transport.fetched == ["state of replica 1"]
    assert (loaded, manager.current_step()) == ([7], 7)
    manager.shutdown()


def test_what_others_use_of_torchft_stays_as_it_is() -> None:
    assert torchft.manager.ManagerServer.__module__ == "builtins"
    assert not isinstance(make(Quorums()), torchft.manager.Manager)


def test_with_torchfts_own_servers_one_address_is_bound() -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    server, url = start_lighthouse("127.0.0.1", TrainConfig())
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = make(None, url, "127.0.0.2", store.port)
    address = store.get("manager_addr").decode()
    assert address.startswith("http://127.0.0.2:")
    port = int(address.rpartition(":")[2])
    bound = {c.laddr.ip for c in psutil.Process().net_connections() if c.laddr and c.laddr.port == port}
    assert "127.0.0.2" in bound
    assert not bound & {"0.0.0.0", "::"}
    manager.shutdown()
    server.shutdown()
