"""The corpus, its split, and the sampler: determinism, disjointness, restart, and errors that say what to do."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from monarch_slurm.train.corpus import DOCUMENT_END, DataError
from monarch_slurm.train.data import Sampler, Split, load_corpus, split_corpus


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "a text.txt"
    path.write_bytes(bytes(range(1, 256)) * 60)
    return str(path)


def sampler(split: Split, shard: int = 0, shards: int = 3, seed: int = 0, batch_size: int = 4) -> Sampler:
    return Sampler(split, seed=seed, shard=shard, shards=shards, batch_size=batch_size)


def test_the_default_is_the_standard_library() -> None:
    corpus = load_corpus(None)
    assert len(corpus) > 5_000_000
    assert load_corpus(None) is corpus
    documents = corpus.tobytes().split(bytes([DOCUMENT_END]))
    assert any(b"class OrderedDict(dict):" in document for document in documents)
    assert not any(b"import torch" in document for document in documents)


def test_a_file_is_its_bytes(text: str) -> None:
    assert load_corpus(text).tobytes() == Path(text).read_bytes()


def test_a_folder_is_its_text_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first ä", encoding="utf-8")
    (tmp_path / "c.txt").write_text("")
    (tmp_path / "a.bin").write_bytes(b"\x00\x01")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert load_corpus(str(tmp_path)).tobytes() == "first ä\0second\0".encode()


def test_windows_do_not_overlap_and_a_twentieth_is_held_out(text: str) -> None:
    split = split_corpus(text, 16)
    every = np.concatenate([split.training, split.validation])
    assert sorted(every) == list(range(255 * 60 // 17))
    assert len(split.validation) / len(every) == pytest.approx(0.05, abs=0.01)
    inputs, targets = split.read(np.array([0, 5]))
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (2, 16)
    assert inputs[1].tolist() == [1 + i % 255 for i in range(85, 101)]
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_validation_is_fixed_and_spread(text: str) -> None:
    split = split_corpus(text, 16)
    first, again = list(split.validation_batches(3, 4)), list(split.validation_batches(3, 4))
    assert [len(inputs) for inputs, _ in first] == [4, 4, 4]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    assert sum(len(inputs) for inputs, _ in split.validation_batches(1000, 7)) == len(split.validation)


def test_shards_never_share_a_window(text: str) -> None:
    split = split_corpus(text, 16)
    samplers = [sampler(split, shard) for shard in range(3)]
    drawn = [{int(w) for step in range(3 * s.steps_per_epoch) for w in s.windows(step)} for s in samplers]
    assert not drawn[0] & drawn[1]
    assert not drawn[1] & drawn[2]
    assert not drawn[0] & drawn[2]
    assert not set().union(*drawn) & set(split.validation.tolist())
    # Over the epochs each shard sees all of its windows, not only those of the first shuffle.
    assert all(len(windows) == len(split.training) // 3 for windows in drawn)


def test_an_epoch_has_every_window_at_most_once_and_the_next_another_order(text: str) -> None:
    one = sampler(split_corpus(text, 16))
    epochs = [
        [int(w) for step in range(e * one.steps_per_epoch, (e + 1) * one.steps_per_epoch) for w in one.windows(step)]
        for e in (0, 1)
    ]
    assert all(len(set(epoch)) == len(epoch) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_a_batch_depends_on_seed_shard_and_step_alone(text: str) -> None:
    split = split_corpus(text, 16)
    here, there = sampler(split, 1), sampler(split, 1)
    for step in (40, 3, 90, 3):  # in any order, through several epochs
        assert here.windows(step).tolist() == there.windows(step).tolist()
    assert sampler(split, 1, seed=1).windows(0).tolist() != here.windows(0).tolist()


def test_restart_goes_on_where_it_was(text: str) -> None:
    split = split_corpus(text, 16)
    whole = sampler(split)
    batches = [whole.next()[0] for _ in range(200)]
    assert whole.steps_per_epoch < 200
    first = sampler(split)
    for _ in range(123):
        first.next()
    second = sampler(split)
    second.load_state_dict(first.state_dict())
    assert all(torch.equal(second.next()[0], batch) for batch in batches[123:])


def test_one_replicas_position_is_anothers(text: str) -> None:
    split = split_corpus(text, 16)
    donor, joiner = sampler(split, 0), sampler(split, 2)
    for _ in range(5):
        donor.next()
    joiner.load_state_dict(donor.state_dict())
    expected = split.read(sampler(split, 2).windows(5))[0]
    assert torch.equal(joiner.next()[0], expected)


def test_missing_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such thing\.txt does not exist"):
        load_corpus(str(tmp_path / "no such thing.txt"))


def test_empty_data(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(DataError, match="is empty"):
        load_corpus(str(tmp_path / "empty"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="no files"):
        load_corpus(str(tmp_path / "folder"))


def test_binary_data(tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"\x89PNG\x00\x00")
    with pytest.raises(DataError, match="not text"):
        load_corpus(str(tmp_path / "image.png"))
    with pytest.raises(DataError, match="1 file, which is not text"):
        load_corpus(str(tmp_path))


def test_neither_file_nor_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="neither a file nor a folder"):
        load_corpus(str(tmp_path / "pipe"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_data(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("x")
    path.chmod(0)
    with pytest.raises(DataError, match="cannot be read"):
        load_corpus(str(path))


def test_too_short_for_the_split(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("word " * 30)
    with pytest.raises(DataError, match="150 bytes are 8 sequences of 16 tokens, at least 20"):
        split_corpus(str(tmp_path / "short"), 16)


def test_too_short_for_the_shards(text: str) -> None:
    with pytest.raises(DataError, match="over 400 trainers are 2 each, fewer than the batch size 4"):
        sampler(split_corpus(text, 16), shards=400)
