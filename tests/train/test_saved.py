from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch

from monarch_slurm.train.saved import (
    SavedState,
    SavedStateError,
    find_saved,
    mark_saved,
    read_state,
    remove_unused,
    state_path,
    write_snapshot,
)
from monarch_slurm.train.saving import PATIENCE, Saving
from monarch_slurm.train.writing import StateWriter

pytestmark = pytest.mark.train

TREE = {"user": {"weights": [torch.arange(6.0).reshape(2, 3), torch.tensor([1], dtype=torch.int8)], "lr": 0.5}, "n": 7}


def save(folder: Path, step: int, keep: int = 1) -> SavedState:
    path = state_path(folder, step, 2, 0)
    sha256, size = write_snapshot(path, TREE)
    assert size == path.stat().st_size
    saved = SavedState(str(folder), step, 2, (sha256,), (size,))
    mark_saved(saved, keep)
    return saved


def test_a_state_comes_back_and_replaces_older_ones(tmp_path: Path) -> None:
    assert find_saved(tmp_path) is None
    save(tmp_path, 9)
    saved = save(tmp_path, 10)
    assert find_saved(tmp_path) == saved
    tree = read_state(saved.path(0), saved.sha256[0])
    assert torch.equal(tree["user"]["weights"][0], TREE["user"]["weights"][0])  # type: ignore[index]
    assert (tree["user"]["lr"], tree["n"]) == (0.5, 7)
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["step-10"]
    assert saved.path(0).stat().st_mode & 0o077 == 0


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "state").iterdir())


def test_the_newest_state_that_is_whole_is_gone_on_with(tmp_path: Path) -> None:
    saved = {step: save(tmp_path, step, keep=3) for step in (2, 4, 6, 8)}
    assert steps(tmp_path) == ["step-4", "step-6", "step-8"]
    saved[8].path(0).unlink()
    saved[6].path(0).write_bytes(saved[6].path(0).read_bytes()[:-1])
    assert find_saved(tmp_path) == saved[4]
    save(tmp_path, 5, keep=3)  # the run has gone on from there; what was saved beyond counts no more
    state_path(tmp_path, 8, 2, 0).touch()
    assert json.loads((tmp_path / "state.json").read_text())["states"][1]["step"] == 4
    for step in (4, 5):
        state_path(tmp_path, step, 2, 0).unlink()
    with pytest.raises(SavedStateError, match=r"no saved state .* is whole: .*/step-5/replica-2/rank-0.state is cut"):
        find_saved(tmp_path)


def test_a_state_is_written_while_the_trainer_goes_on(tmp_path: Path) -> None:
    writer = StateWriter(2, 0)
    assert writer.take() is None
    weights = torch.arange(6.0)
    writer.begin(tmp_path, 3, {"weights": weights})
    weights += 1
    told = writer.take(wait=True)
    assert told is not None
    assert (told["step"], writer.step, writer.busy) == (3, 3, False)
    tree = read_state(state_path(tmp_path, 3, 2, 0), told["sha256"])
    assert tree["weights"].tolist() == [0, 1, 2, 3, 4, 5]
    assert writer.take(wait=True) is None
    (tmp_path / "state" / "step-4").write_text("a file in the way")
    writer.begin(tmp_path, 4, {"weights": weights})
    told = writer.take(wait=True)
    assert told is not None
    assert "cannot save the state in" in told["error"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:-1], "cut short"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "its hash is not"),
        (lambda data: b"\xff" * len(data), "damaged"),
        (lambda data: b"", "cut short"),
    ],
)
def test_what_is_damaged_is_not_loaded(tmp_path: Path, damage, said: str) -> None:
    saved = save(tmp_path, 3)
    path = saved.path(0)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SavedStateError, match=said):
        read_state(path, saved.sha256[0])


def test_a_state_that_cannot_be_written_leaves_nothing_and_is_told(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file in the way")
    with pytest.raises(SavedStateError, match=r"cannot save the state in .*/state/step-1/replica-0/rank-0"):
        write_snapshot(state_path(tmp_path, 1, 0, 0), TREE)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder / "state")) for path in (folder / "state").rglob("*"))


def test_a_failed_write_leaves_neither_a_part_nor_empty_folders(tmp_path: Path) -> None:
    write_snapshot(state_path(tmp_path, 1, 0, 0), TREE)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))  # bytes; Python ignores SIGXFSZ, so that write(2) fails
    try:
        for path in (state_path(tmp_path, 1, 0, 1), state_path(tmp_path, 2, 0, 0)):
            with pytest.raises(SavedStateError, match="File too large"):
                write_snapshot(path, TREE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert files(tmp_path) == ["step-1", "step-1/replica-0", "step-1/replica-0/rank-0.state"]


def test_a_rank_discards_what_another_failed_to_save_now_or_when_it_is_written(tmp_path: Path) -> None:
    writer = StateWriter(0, 0)
    writer.begin(tmp_path, 1, TREE)
    assert writer.take(wait=True) is not None
    writer.discard(tmp_path, 1)
    assert files(tmp_path) == []
    writer.discard(tmp_path, 2)  # this rank is slower than the one that has failed
    writer.begin(tmp_path, 2, TREE)
    writer.discard(tmp_path, 2)
    told = writer.take(wait=True)
    assert told is not None
    assert told["step"] == 2
    assert files(tmp_path) == []
    writer.begin(tmp_path, 3, TREE)
    assert writer.take(wait=True) is not None
    assert files(tmp_path)[-1] == "step-3/replica-0/rank-0.state"


def test_what_no_run_can_continue_from_is_removed(tmp_path: Path) -> None:
    kept = save(tmp_path, 4)
    for step, replica in ((4, 1), (5, 1), (5, 2), (6, 2)):
        write_snapshot(state_path(tmp_path, step, replica, 0), TREE)
    state_path(tmp_path, 6, 2, 1).with_name(".rank-1.state.77").write_bytes(b"half")
    remove_unused(tmp_path, replica=1)
    assert [name for name in files(tmp_path) if "/" in name and "rank" not in name] == [
        "step-4/replica-2", "step-5/replica-2", "step-6/replica-2",
    ]  # fmt: skip
    remove_unused(tmp_path, step=5)
    assert steps(tmp_path) == ["step-4", "step-6"]
    remove_unused(tmp_path)
    assert files(tmp_path) == ["step-4", "step-4/replica-2", "step-4/replica-2/rank-0.state"]
    assert find_saved(tmp_path) == kept


def test_a_marker_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    saved = save(tmp_path, 4)
    (tmp_path / "state.json").unlink()
    (tmp_path / "state.json").mkdir()
    with pytest.raises(SavedStateError):
        mark_saved(saved)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state", "state.json"]


def test_a_marker_that_makes_no_sense_is_told(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(SavedStateError, match="remove it to begin the run anew"):
        find_saved(tmp_path)


def saved_event(replica: int, rank: int, step: int) -> dict[str, object]:
    files = {"sha256": f"{step}.{rank}", "bytes": 10 + rank}
    return {"kind": "saved", "replica": replica, "rank": rank, "step": step, **files}


def test_one_replica_is_asked_and_another_if_it_fails_or_is_slow() -> None:
    saving = Saving("/run", 1)
    assert saving.next_replica([1, 2], 0.0) == 1
    assert saving.next_replica([1, 2], 1.0) is None
    saving.lost(1)
    assert saving.next_replica([2], 2.0) == 2
    assert saving.next_replica([1, 2], 3.0) is None
    assert saving.next_replica([1, 2], 3.0 + PATIENCE) == 1
    assert not saving.is_hopeless([1, 2], 3.0 + PATIENCE)
    assert saving.is_hopeless([1, 2], 3.0 + 4 * PATIENCE)
    assert saving.is_hopeless([], 3.0)


def test_when_a_rank_fails_to_save_another_replica_is_asked_at_once() -> None:
    saving = Saving("/run", 1)
    failed = {"kind": "saved", "rank": 0, "step": 4, "error": "no space"}
    assert saving.next_replica([1, 2], 0.0) == 1
    assert saving.take({**failed, "replica": 1}) is None
    assert saving.next_replica([1, 2], 1.0) == 2
    assert not saving.is_hopeless([1, 2], 1.0)
    assert saving.take({**failed, "replica": 2}) is None
    assert saving.next_replica([1, 2], 1.0) is None
    assert saving.is_hopeless([1, 2], 1.0)


def test_a_state_is_whole_when_all_ranks_have_saved_the_same_step() -> None:
    saving = Saving("/run", 2)
    assert saving.take(saved_event(0, 0, 4)) is None
    assert saving.take(saved_event(0, 1, 5)) is None
    assert saving.take(saved_event(1, 0, 5)) is None
    assert saving.take(saved_event(0, 0, 5)) == SavedState("/run", 5, 0, ("5.0", "5.1"), (10, 11))
    assert saving.take(saved_event(0, 0, 6)) is None
    assert saving.take({**saved_event(0, 0, 7), "error": "no space"}) is None
    assert saving.take(saved_event(0, 1, 7)) is None
    assert saving.take(saved_event(0, 0, 7)) is None  # what the other rank has written is removed
    saving.lost(0)
    assert saving.take(saved_event(0, 1, 6)) is None  # of other processes than rank 0 was
    assert saving.take(saved_event(0, 0, 6)) == SavedState("/run", 6, 0, ("6.0", "6.1"), (10, 11))
