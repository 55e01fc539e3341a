"""Digests of what a run reads, and a run that continues with something else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support import run_command

from monarch_slurm.errors import ConfigError
from monarch_slurm.train import inputs
from monarch_slurm.train.config import TrainConfig
from monarch_slurm.train.inputs import BLOCK_BYTES, WHOLE_BYTES, changed_inputs, inputs_of
from monarch_slurm.train.resuming import checked_inputs
from monarch_slurm.train.saved import SavedState, find_saved, mark_saved


def digest(path: Path | None) -> str:
    return inputs_of(TrainConfig(data=None if path is None else str(path)))["data"]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / "a.txt").write_text("first " * 50_000)
    (folder / "b" / "empty").touch()
    (folder / "b" / "c.txt").write_text("second " * 50_000)
    return folder


def test_a_copy_has_the_same_digest_and_every_change_another(texts: Path, tmp_path: Path) -> None:
    copied = tmp_path / "elsewhere" / "copy"
    shutil.copytree(texts, copied)
    (copied / ".hidden").write_text("not read")
    assert digest(copied) == digest(texts)
    assert digest(texts / "a.txt") != digest(texts)
    found = {digest(texts)}
    first = copied / "a.txt"
    text = first.read_text()
    for changed in (text[:-1], text + "x", text.replace("f", "F", 1), text[:-1] + "X"):
        first.write_text(changed)
        found.add(digest(copied))
    first.write_text(text)
    (copied / "d.txt").write_text("third")
    found.add(digest(copied))
    (copied / "d.txt").unlink()
    first.rename(copied / "b" / "z.txt")  # read last, now
    found.add(digest(copied))
    assert len(found) == 7


def test_of_much_data_blocks_are_read_all_over_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In miniature, and with sparse files: 20 MiB, of which 1 MiB is read.
    monkeypatch.setattr(inputs, "WHOLE_BYTES", 1 << 20)
    monkeypatch.setattr(inputs, "BLOCKS", (1 << 20) // BLOCK_BYTES)
    folder = tmp_path / "texts"
    folder.mkdir()
    total = 20 << 20
    for name, size in (("a", total // 2 + 12345), ("b", 7), ("c", total // 2)):
        with open(folder / name, "wb") as file:
            file.truncate(size)
    found = {digest(folder)}
    part = total // 15 + 1  # as much as lies between the starts of two blocks
    for name, place in (("a", 0), ("a", 5_234_567), ("c", 4321), ("c", total // 2 - 1)):
        path = folder / name
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(b"x" * min(part, path.stat().st_size - place))
        found.add(digest(folder))
    with open(folder / "b", "ab") as file:
        file.write(b"x")
    found.add(digest(folder))
    assert len(found) == 6


def test_the_default_text_has_a_digest_and_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert digest(None) == digest(None)
    with pytest.raises(ConfigError, match=f"{tmp_path}/none does not exist"):
        digest(tmp_path / "none")


def test_what_had_no_digest_before_is_not_compared() -> None:
    assert changed_inputs({}, {"data": "1"}) == []
    assert changed_inputs({"data": "1", "tokenizer": "2"}, {"data": "1", "tokenizer": "3"}) == ["the tokenizer"]
    assert changed_inputs({"data": "1"}, {}) == ["the training data"]


def test_another_text_is_refused_unless_the_user_allows_it(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, config = tmp_path / "run", TrainConfig(data=str(texts))
    (run / "state").mkdir(parents=True)
    before = checked_inputs(run, config)
    mark_saved(SavedState(str(run), 3, 0, (), (), tuple(before.items())))
    assert find_saved(run) == SavedState(str(run), 3, 0, (), (), tuple(before.items()))
    assert checked_inputs(run, config) == before
    with open(texts / "a.txt", "a") as file:
        file.write("more")
    with pytest.raises(ConfigError, match=r"data is not what the run in .* has read until its saved state \(sync 3\)"):
        checked_inputs(run, config)
    assert capsys.readouterr().out == ""
    assert checked_inputs(run, config, allow_changed=True) != before
    assert "continuing all the same (--allow-changed-data)" in capsys.readouterr().out


def test_the_command_line_refuses_another_text_and_starts_nothing(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (run / "state").mkdir(parents=True)
    config = TrainConfig(data=str(texts), model="tiny", seq_len=32)
    event = {"kind": "run_started", "t": 1.0, "config": config.to_dict()}
    (run / "journal.jsonl").write_text(json.dumps(event) + "\n")
    mark_saved(SavedState(str(run), 3, 0, (), (), (("data", "of another text"),)))
    before = sorted(run.iterdir())
    code, said = run_command(monkeypatch, capsys, "train", "--local", "--resume", str(run))
    assert (code, "--allow-changed-data" in said) == (2, True), said
    assert sorted(run.iterdir()) == before


def test_blocks_are_as_many_as_are_documented() -> None:
    assert inputs.BLOCKS * BLOCK_BYTES == WHOLE_BYTES
