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

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from monarch_slurm.errors import ConfigError

VOCAB = 256
"""Size of the vocabulary: one token per byte."""

DOCUMENT_END = 0
"""The token between two documents."""

_HELD_OUT = 20  # every so many runs of windows, one is held out
_PROBE_BYTES = 1 << 16  # so much of a file is looked at to tell text from anything else
_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests"})

Bytes = npt.NDArray[np.uint8]


class DataError(ConfigError):
    """The training text cannot be used; the message names the path and what to change."""


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
    if data is None:
        return _load_folder(sysconfig.get_paths()["stdlib"], ".py", _SKIPPED_FOLDERS)
    path = os.path.abspath(os.path.expanduser(data))
    if not os.path.exists(path):
        raise DataError(f"training data {path} does not exist: give a text file or a folder that every host can read")
    if os.path.isdir(path):
        return _load_folder(path, "", frozenset({"__pycache__"}))
    return _map_file(path)


@lru_cache(maxsize=2)
def _map_file(path: str) -> Bytes:
    try:
        if not os.path.isfile(path):
            raise DataError(f"training data {path} is neither a file nor a folder")
        if os.path.getsize(path) == 0:
            raise DataError(f"training data {path} is empty: give a file with text in it")
        corpus = np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise _unreadable(path, error) from error
    if (corpus[:_PROBE_BYTES] == DOCUMENT_END).any():
        raise DataError(f"training data {path} is not text (it contains NUL bytes): give plain text, not an archive")
    return corpus


@lru_cache(maxsize=2)
def _load_folder(folder: str, suffix: str, skipped: frozenset[str]) -> Bytes:
    parts: list[bytes] = []
    files = 0

    def stop(error: OSError) -> None:
        raise error

    try:
        for parent, folders, names in os.walk(folder, onerror=stop):
            folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
            for name in sorted(names):
                if name.startswith(".") or not name.endswith(suffix):
                    continue
                path = os.path.join(parent, name)
                if not os.path.isfile(path):
                    continue
                files += 1
                text = Path(path).read_bytes()
                if text and DOCUMENT_END not in text:
                    parts += (text, bytes([DOCUMENT_END]))
    except OSError as error:
        raise _unreadable(str(error.filename or folder), error) from error
    if not parts:
        seen = f"{files} files, none of them text" if files else "no files"
        raise DataError(f"training data {folder} has no text in it ({seen}): give a folder with text files")
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


def _unreadable(path: str, error: OSError) -> DataError:
    return DataError(f"training data {path} cannot be read ({error.strerror or error}): check its permissions")


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
    source = "the Python standard library" if data is None else data
    window = seq_len + 1
    windows = np.arange(len(corpus) // window)
    if len(windows) < _HELD_OUT:
        raise DataError(
            f"training data {source} is too short: {len(corpus)} bytes are {len(windows)} sequences of {seq_len}"
            f" tokens, at least {_HELD_OUT} are needed; give more text or a smaller seq_len"
        )
    # Long runs keep held-out text apart from its neighbours in the training text; a short corpus has short runs, so
    # that there is always one to hold out.
    run = min(max(len(windows) // (_HELD_OUT * _HELD_OUT), 1), 64)
    held_out = (windows // run) % _HELD_OUT == _HELD_OUT // 2
    return Split(corpus, window, windows[~held_out], windows[held_out], source)


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
        own = len(split.training) // shards
        if own < batch_size:
            raise DataError(
                f"training data {split.source} is too short: {len(split.training)} training sequences over {shards}"
                f" trainers are {own} each, fewer than the batch size {batch_size}; give more text, a smaller seq_len"
                " or a smaller batch"
            )
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
