"""Training text as files: which files of a folder count, and whether there is enough text, without reading all of it.

Nothing here needs numpy or torch, so that a login node can check what a job is to train on.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass

from monarch_slurm.errors import ConfigError

VOCAB = 256
"""Size of the vocabulary: one token per byte."""

DOCUMENT_END = 0
"""The token between two documents."""

HELD_OUT = 20
"""Of so many runs of windows, one is held out for validation."""

PROBE_BYTES = 1 << 16
"""So much of a file is looked at to tell text from anything else."""

_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests"})


class DataError(ConfigError):
    """The training text cannot be used; the message names the path and what to change."""


@dataclass(frozen=True)
class Folder:
    """A folder of text files.

    Attributes:
        path: of the folder.
        suffix: with which the names of its text files end.
        skipped: names of folders in it that are left out.
    """

    path: str
    suffix: str = ""
    skipped: frozenset[str] = frozenset({"__pycache__"})

    def files(self) -> Iterator[str]:
        """Yield the paths of its files, sorted; not hidden ones, nor what symbolic links to folders lead to.

        Raises:
            OSError: a folder in it cannot be read.
        """

        def stop(error: OSError) -> None:
            raise error

        for parent, folders, names in os.walk(self.path, onerror=stop):
            folders[:] = sorted(name for name in folders if name not in self.skipped and not name.startswith("."))
            for name in sorted(names):
                path = os.path.join(parent, name)
                if not name.startswith(".") and name.endswith(self.suffix) and os.path.isfile(path):
                    yield path

    def without_text(self, files: int) -> DataError:
        """Return the error that none of its ``files`` files is text."""
        seen = "no files" if not files else "1 file, which is not text" if files == 1 else f"{files} files, none text"
        return DataError(f"training data {self.path} has no text in it ({seen}): give a folder with text files")


def find_corpus(data: str | None) -> str | Folder:
    """Return where the text is: the path of a file, or a folder.

    Args:
        data: path of a file or folder; None is the standard library of Python without its tests.

    Raises:
        DataError: there is nothing, or something that is neither a file nor a folder.
    """
    if data is None:
        return Folder(sysconfig.get_paths()["stdlib"], ".py", _SKIPPED_FOLDERS)
    path = os.path.abspath(os.path.expanduser(data))
    if not os.path.exists(path):
        raise DataError(f"training data {path} does not exist: give a text file or a folder that every host can read")
    if os.path.isdir(path):
        return Folder(path)
    if not os.path.isfile(path):
        raise DataError(f"training data {path} is neither a file nor a folder")
    return path


def unreadable(path: str, error: OSError) -> DataError:
    """Return the error for a path that cannot be read."""
    return DataError(f"training data {path} cannot be read ({error.strerror or error}): check its permissions")


def held_out_run(windows: int) -> int:
    """Return the length of the runs of windows of which one in `HELD_OUT` is for validation.

    Long runs keep held-out text apart from its neighbours in the training text; a short corpus has short runs, so that
    there is always one to hold out.
    """
    return min(max(windows // (HELD_OUT * HELD_OUT), 1), 64)


def check_length(size: int, seq_len: int, source: str) -> int:
    """Return the number of windows in ``size`` bytes of text.

    Raises:
        DataError: there are too few of them to hold some out.
    """
    windows = size // (seq_len + 1)
    if windows < HELD_OUT:
        raise DataError(
            f"training data {source} is too short: {size} bytes are {windows} sequences of {seq_len}"
            f" tokens, at least {HELD_OUT} are needed; give more text or a smaller seq_len"
        )
    return windows


def check_shards(training: int, shards: int, batch_size: int, source: str) -> int:
    """Return how many of ``training`` windows each of ``shards`` trainers has.

    Raises:
        DataError: they are fewer than a batch needs.
    """
    own = training // shards
    if own < batch_size:
        raise DataError(
            f"training data {source} is too short: {training} training sequences over {shards}"
            f" trainers are {own} each, fewer than the batch size {batch_size}; give more text, a smaller seq_len"
            " or a smaller batch"
        )
    return own


def source_name(data: str | None) -> str:
    """Return what the text is, for messages."""
    return "the Python standard library" if data is None else data


def check_corpus(data: str | None, *, seq_len: int, shards: int, batch_size: int) -> None:
    """Make sure that there is text, and enough of it for every trainer, from the sizes of the files.

    Of a file the beginning is read, at most `PROBE_BYTES`; files of a folder are looked at until there is enough. So
    what only a later part would show (a NUL byte, a file without permission) is found by the trainers.

    Args:
        data: as for `find_corpus`.
        seq_len: tokens in a sequence.
        shards: number of trainers, ``replicas * procs_per_replica``.
        batch_size: sequences in a batch.

    Raises:
        DataError: nothing there, not readable, empty, not text, or too short.
    """
    found = find_corpus(data)
    enough = (seq_len + 1) * max(2 * HELD_OUT, 2 * shards * batch_size)  # a twentieth is held out, so twice is plenty
    if isinstance(found, str):
        size = _file_size(found)
    else:
        size = files = 0
        path = found.path
        try:
            for path in found.files():
                files += 1
                size += os.path.getsize(path) + 1 if _is_text(path) else 0
                if size >= enough:
                    return
        except OSError as error:
            raise unreadable(str(error.filename or path), error) from error
        if not size:
            raise found.without_text(files)
    if size >= enough:
        return
    windows = check_length(size, seq_len, source_name(data))
    run = held_out_run(windows)
    training = sum(window // run % HELD_OUT != HELD_OUT // 2 for window in range(windows))
    check_shards(training, shards, batch_size, source_name(data))


def _file_size(path: str) -> int:
    try:
        size = os.path.getsize(path)
        if not size:
            raise DataError(f"training data {path} is empty: give a file with text in it")
        if not _is_text(path):
            raise not_text(path)
    except OSError as error:
        raise unreadable(path, error) from error
    return size


def not_text(path: str) -> DataError:
    """Return the error for a file with NUL bytes."""
    return DataError(f"training data {path} is not text (it contains NUL bytes): give plain text, not an archive")


def _is_text(path: str) -> bool:
    """Return whether the beginning of a file is text; an empty file is not."""
    with open(path, "rb") as file:
        beginning = file.read(PROBE_BYTES)
    return bool(beginning) and DOCUMENT_END not in beginning
