"""The state of a run on disk, from which the run goes on after its job was ended: written whole, verified when loaded.

One replica's state is enough. Each of its ranks writes a file of its own, in the format in which states travel between
replicas (`monarch_slurm.train.state`); nothing is pickled. When all ranks have, the manager names the files and their
hashes in ``state.json``, which is what makes them count: a save that was cut short leaves the one before it in force.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch_slurm.errors import MonarchSlurmError

SAVED_FILE = "state.json"
_FOLDER = "state"
_STEP = re.compile(r"step-([0-9]+)")


class SavedStateError(MonarchSlurmError):
    """A saved state cannot be written, or is not what was saved; the text names the file."""


@dataclass(frozen=True)
class SavedState:
    """A saved state that is whole.

    Attributes:
        folder: of the run, absolute.
        step: committed syncs that it holds.
        sha256: hash of the state of each rank of a replica, by rank.
    """

    folder: str
    step: int
    sha256: tuple[str, ...]

    def path(self, rank: int) -> Path:
        """Return the file of ``rank``."""
        return state_path(Path(self.folder), self.step, rank)


def state_path(folder: Path, step: int, rank: int) -> Path:
    """Return where the state of ``rank`` at ``step`` goes in the run's ``folder``."""
    return folder / _FOLDER / f"step-{step}" / f"rank-{rank}.state"


def write_state(path: Path, tree: Any) -> tuple[str, int]:
    """Write a trainer's state (see `monarch_slurm.train.state`) so that ``path`` is whole, and on the disk, or absent.

    Returns:
        Its sha256 and the bytes of its tensors.

    Raises:
        SavedStateError: it cannot be written.
    """
    from monarch_slurm.train import state

    copy = state.snapshot(tree)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(state.encode_header(copy))
            for tensor in state.tensors(copy):
                file.write(state.raw_bytes(tensor))
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise SavedStateError(f"cannot save the state in {path}: {error.strerror}") from error
    return state.digest(copy), state.size(copy)


def read_state(path: Path, sha256: str) -> Any:
    """Return the snapshot in ``path``.

    Raises:
        SavedStateError: it cannot be read, or is not what was saved.
    """
    from monarch_slurm.train import state

    try:
        with open(path, "rb") as file:

            def fill(buffer: memoryview) -> None:
                done = 0
                while done < len(buffer):
                    count = file.readinto(buffer[done:])
                    if not count:
                        raise SavedStateError(f"the saved state {path} is cut short")
                    done += count

            tree = state.read_snapshot(fill)
    except OSError as error:
        raise SavedStateError(f"cannot read the saved state {path}: {error.strerror}") from error
    except state.StateError as error:
        raise SavedStateError(f"the saved state {path} is damaged: {error}") from error
    if state.digest(tree) != sha256:
        raise SavedStateError(f"the saved state {path} is damaged: its hash is not that of what was saved")
    return tree


def mark_saved(saved: SavedState) -> None:
    """Make ``saved`` the state that the run goes on from, and remove older ones.

    Raises:
        SavedStateError: the run's folder cannot be written.
    """
    folder = Path(saved.folder)
    path = folder / SAVED_FILE
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("w") as file:
            json.dump({"step": saved.step, "sha256": saved.sha256}, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        _sync_folder(folder)
    except OSError as error:
        raise SavedStateError(f"cannot save the state in {path}: {error.strerror}") from error
    for old in (folder / _FOLDER).iterdir():
        match = _STEP.fullmatch(old.name)
        if match is not None and int(match.group(1)) < saved.step:
            shutil.rmtree(old, ignore_errors=True)


def find_saved(folder: Path) -> SavedState | None:
    """Return the state that the run in ``folder`` goes on from; None if none was saved.

    Raises:
        SavedStateError: ``state.json`` makes no sense.
    """
    path = folder / SAVED_FILE
    try:
        told = json.loads(path.read_text())
        return SavedState(str(folder.absolute()), int(told["step"]), tuple(map(str, told["sha256"])))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SavedStateError(f"cannot read {path} ({error}); remove it to begin the run anew") from error


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
