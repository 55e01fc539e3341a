"""How hosts are shared among replicas, and which saved states count."""

from __future__ import annotations

from pathlib import Path

import pytest

from monarch_slurm.actor import HostMesh, Shape, Slice
from monarch_slurm.errors import ConfigError
from monarch_slurm.train.config import TrainConfig
from monarch_slurm.train.events import event
from monarch_slurm.train.manager import Run, RunFailedError, share_hosts
from monarch_slurm.train.saved import SavedState, find_saved, state_path, write_snapshot


def hosts(count: int) -> HostMesh:
    names = tuple(f"n{i}#1" for i in range(count))
    return HostMesh(names, Shape(["hosts"], Slice.new_row_major([count])), owned=False)


@pytest.mark.parametrize(
    ("count", "replicas", "procs", "expected"),
    [
        (1, 3, 1, [["n0"], ["n0"], ["n0"]]),
        (2, 3, 4, [["n0"], ["n1"], ["n0"]]),
        (4, 4, 1, [["n0"], ["n1"], ["n2"], ["n3"]]),
        (4, 2, 2, [["n0", "n1"], ["n2", "n3"]]),
        (5, 2, 4, [["n0", "n1"], ["n2", "n3"]]),
    ],
)
def test_hosts_are_consecutive_or_in_turn(count: int, replicas: int, procs: int, expected: list[list[str]]) -> None:
    config = TrainConfig(replicas=replicas, procs_per_replica=procs)
    assert [share.host_names for share in share_hosts(hosts(count), config)] == expected


def test_procs_must_spread_evenly() -> None:
    with pytest.raises(ConfigError, match="multiple of 2"):
        share_hosts(hosts(4), TrainConfig(replicas=2, procs_per_replica=3))


def test_one_machine_is_shared_by_all() -> None:
    local = HostMesh(("here#1",), Shape.unity(), owned=False)
    assert [share.host_names for share in share_hosts(local, TrainConfig(replicas=2))] == [["here"], ["here"]]


@pytest.mark.train
def test_a_state_counts_when_its_files_are_seen_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(TrainConfig(replicas=2), tmp_path)
    path = state_path(tmp_path, 4, 1, 0)
    path.parent.mkdir(parents=True)
    sha256, size = write_snapshot(path, {"lr": 0.5})
    told = {"kind": "saved", "replica": 1, "generation": 0, "rank": 0, "step": 4, "sha256": sha256, "bytes": size}
    path.rename(tmp_path / "elsewhere")
    run._take(event(**told))
    assert find_saved(tmp_path) is None
    assert f"{path} is not seen here as replica 1 has written it" in caplog.text
    (tmp_path / "elsewhere").rename(path)
    run._take(event(**told))
    assert find_saved(tmp_path) == SavedState(str(tmp_path), 4, 1, (sha256,), (size,))
    assert [item["kind"] for item in run.events] == ["saved", "saved", "state_saved"]
    run._journal.close()


def test_a_state_that_a_replica_refused_ends_the_run(tmp_path: Path) -> None:
    run = Run(TrainConfig(replicas=4), tmp_path)
    refused = "UntrustedStateError: the state of step 4 that replica 1 got from replica 2 has the hash a, but b"
    with pytest.raises(RunFailedError, match=f"replica 1 refused a state, and the run was stopped: {refused}"):
        run._take(event("error", replica=1, generation=0, rank=0, error=refused, traceback=""))
    run._journal.close()
