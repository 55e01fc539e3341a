"""Training text as bytes, and a sampler whose whole state is a step counter.

A token is a byte. NUL, which text does not contain, stands between documents, so that the vocabulary is 256.

The text is cut into windows of ``seq_len + 1`` bytes that do not overlap: a window gives ``seq_len`` inputs and the
same number of targets, one byte later. Consecutive windows form runs, and every twentieth run is held out for
validation; the others are dealt out to the shards. A shard is a (replica, rank) pair, numbered
``replica * ranks + rank``; shard ``s`` of ``n`` owns the training windows ``s, s + n, s + 2 n, ...`` for the whole run,
the same number of windows for each shard. In each epoch a shard goes once through its own windows in an order that is
drawn from (seed, shard, epoch). So two trainers never draw the same window, and the batch of a step depends on nothing
but (seed, replica, rank, step).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from monarch_slurm.train.corpus import (
    DOCUMENT_END,
    HELD_OUT,
    PROBE_BYTES,
    DataError,
    Folder,
    check_length,
    check_shards,
    find_corpus,
    held_out_run,
    not_text,
    source_name,
    unreadable,
)

Bytes = npt.NDArray[np.uint8]


def load_corpus(data: str | None) -> Bytes:
    """Return the text of a file, of all text files in a folder, or of the Python standard library, as bytes.

    A file is mapped, not read: processes of one host share its pages, and it may be larger than memory. A folder is
    read in sorted order into memory, with `DOCUMENT_END` between files; files that are not text (they contain NUL),
    hidden ones and symbolic links to folders are passed over. The result is kept, so that a forked process shares it.

    Args:
        data: path of a file or folder; None is the standard library without its tests, about 12 MB of Python.

    Raises:
        DataError: nothing there, not readable, empty, or not text.
    """
    found = find_corpus(data)
    return _map_file(found) if isinstance(found, str) else _load_folder(found)


@lru_cache(maxsize=2)
def _map_file(path: str) -> Bytes:
    try:
        if Path(path).stat().st_size == 0:
            raise DataError(f"training data {path} is empty: give a file with text in it")
        corpus = np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise unreadable(path, error) from error
    if (corpus[:PROBE_BYTES] == DOCUMENT_END).any():
        raise not_text(path)
    return corpus


@lru_cache(maxsize=2)
def _load_folder(folder: Folder) -> Bytes:
    whole = bytearray()  # grows in place; joined pieces would need twice the memory
    files, path = 0, folder.path
    try:
        for path in folder.files():
            files += 1
            text = Path(path).read_bytes()
            if text and DOCUMENT_END not in text:
                whole += text
                whole.append(DOCUMENT_END)
    except OSError as error:
        raise unreadable(str(error.filename or path), error) from error
    if not whole:
        raise folder.without_text(files)
    corpus = np.frombuffer(whole, dtype=np.uint8)
    corpus.flags.writeable = False
    return corpus


@dataclass(frozen=True)
class Split:
    """Which windows of a corpus are for training and which are held out.

    Attributes:
        corpus: ``(bytes,)`` uint8.
        window: bytes in a window, ``seq_len + 1``.
        training: ``(n,)`` int64, numbers of the training windows, rising.
        validation: ``(m,)`` int64, numbers of the held-out windows, rising.
        source: what the text is, for messages.
    """

    corpus: Bytes
    window: int
    training: npt.NDArray[np.int64]
    validation: npt.NDArray[np.int64]
    source: str

    def read(self, windows: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of ``windows`` ``(B,)``, each ``(B, seq_len)`` int64 on the CPU."""
        places = windows[:, None] * self.window + np.arange(self.window)
        tokens = torch.from_numpy(self.corpus[places].astype(np.int64))
        return tokens[:, :-1], tokens[:, 1:]

    def validation_batches(self, count: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield at most ``count`` fixed batches of held-out text, spread evenly over it; see `read` for shapes."""
        wanted = min(count * batch_size, len(self.validation))
        chosen = self.validation[np.linspace(0, len(self.validation) - 1, wanted).round().astype(np.int64)]
        for start in range(0, wanted, batch_size):
            yield self.read(chosen[start : start + batch_size])


def split_corpus(data: str | None, seq_len: int) -> Split:
    """Load a corpus and hold out one twentieth of it.

    Args:
        data: as for `load_corpus`.
        seq_len: tokens in a sequence.

    Raises:
        DataError: as `load_corpus`, or the text is shorter than 20 windows.
    """
    corpus = load_corpus(data)
    source = source_name(data)
    windows = np.arange(check_length(len(corpus), seq_len, source))
    held_out = windows // held_out_run(len(windows)) % HELD_OUT == HELD_OUT // 2
    return Split(corpus, seq_len + 1, windows[~held_out], windows[held_out], source)


class Sampler:
    """Draws the batches of one trainer rank; its state is the number of batches drawn.

    Args:
        split: the corpus.
        seed: seed of the run.
        shard: number of this trainer, ``replica * ranks + rank``.
        shards: number of trainers, ``replicas * ranks``.
        batch_size: sequences in a batch.

    Raises:
        DataError: a shard has fewer windows than one batch needs.
    """

    def __init__(self, split: Split, *, seed: int, shard: int, shards: int, batch_size: int) -> None:
        own = check_shards(len(split.training), shards, batch_size, split.source)
        self.step = 0
        self._split, self._seed, self._shard, self._batch_size = split, seed, shard, batch_size
        self._windows = split.training[shard::shards][:own]
        self._epoch = -1
        self._order = self._windows

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the shard; what is left of it is passed over in that epoch."""
        return len(self._windows) // self._batch_size

    def windows(self, step: int) -> npt.NDArray[np.int64]:
        """Return the numbers of the windows in the batch of ``step``, ``(B,)`` int64."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            random = np.random.default_rng([self._seed, self._shard, epoch])
            self._epoch, self._order = epoch, random.permutation(self._windows)
        return self._order[place * self._batch_size : (place + 1) * self._batch_size]

    def next(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the next batch, each ``(B, seq_len)`` int64 on the CPU, and move on."""
        batch = self._split.read(self.windows(self.step))
        self.step += 1
        return batch

    def state_dict(self) -> dict[str, int]:
        """Return the position, which means the same for every trainer of the run."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position: the next batch is the one that follows it in this trainer's own shard."""
        self.step = state["step"]
