from __future__ import annotations

from pathlib import Path

import pytest
import torch

from monarch_slurm.train.saved import (
    SavedState,
    SavedStateError,
    find_saved,
    mark_saved,
    read_state,
    state_path,
    write_state,
)
from monarch_slurm.train.saving import PATIENCE, Saving

pytestmark = pytest.mark.train

TREE = {"user": {"weights": [torch.arange(6.0).reshape(2, 3), torch.tensor([1], dtype=torch.int8)], "lr": 0.5}, "n": 7}


def save(folder: Path, step: int) -> SavedState:
    sha256, count = write_state(state_path(folder, step, 0), TREE)
    assert count == 25
    saved = SavedState(str(folder), step, (sha256,))
    mark_saved(saved)
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
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "state" / "step-10").iterdir())


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
    with pytest.raises(SavedStateError, match=r"cannot save the state in .*/state/step-1/rank-0"):
        write_state(state_path(tmp_path, 1, 0), TREE)


def test_a_marker_that_makes_no_sense_is_told(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(SavedStateError, match="remove it to begin the run anew"):
        find_saved(tmp_path)


def saved_event(replica: int, rank: int, step: int) -> dict[str, object]:
    return {"kind": "saved", "replica": replica, "rank": rank, "step": step, "sha256": f"{step}.{rank}"}


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


def test_a_state_is_whole_when_all_ranks_have_saved_the_same_step() -> None:
    saving = Saving("/run", 2)
    assert saving.take(saved_event(0, 0, 4)) is None
    assert saving.take(saved_event(0, 1, 5)) is None
    assert saving.take({**saved_event(0, 0, 5), "error": "no space"}) is None
    assert saving.take(saved_event(1, 0, 5)) is None
    assert saving.take(saved_event(0, 0, 5)) == SavedState("/run", 5, ("5.0", "5.1"))
