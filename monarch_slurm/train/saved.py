"""The state of a run on disk, from which the run goes on after its job was ended: written whole, verified when loaded.

One replica's state is enough. Each of its ranks writes a file of its own, in the format in which states travel between
replicas (`monarch_slurm.train.state`); nothing is pickled. When all ranks have, the manager names the files and their
hashes in ``state.json``, which is what makes them count: a save that was cut short leaves the ones before it in force.
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
from monarch_slurm.owned_files import (
    LARGE_BYTES,
    FileRefusedError,
    create_owned,
    make_folders,
    open_owned,
    owned_json,
    write_whole,
)

SAVED_FILE = "state.json"

RUN_LINK = "run"
"""Name, in a job's folder, of a link to the folder of the run that the job trains."""

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
        replica: that has saved it.
        sha256: hash of the state of each of its ranks, by rank.
        sizes: of their files, bytes.
        inputs: name and digest of what the run reads besides its options, see `monarch_slurm.train.inputs`.
    """

    folder: str
    step: int
    replica: int
    sha256: tuple[str, ...]
    sizes: tuple[int, ...]
    inputs: tuple[tuple[str, str], ...] = ()

    def path(self, rank: int) -> Path:
        """Return the file of ``rank``."""
        return state_path(Path(self.folder), self.step, self.replica, rank)

    def missing(self) -> Path | None:
        """Return a file of it that is not there, or not as long as it was; None if there is none."""
        for rank, size in enumerate(self.sizes):
            path = self.path(rank)
            try:
                if path.stat().st_size != size:
                    return path
            except OSError:
                return path
        return None


def state_path(folder: Path, step: int, replica: int, rank: int) -> Path:
    """Return where the state of a rank at ``step`` goes in the run's ``folder``."""
    return folder / _FOLDER / f"step-{step}" / f"replica-{replica}" / f"rank-{rank}.state"


def write_snapshot(path: Path, copy: Any) -> tuple[str, int]:
    """Write what `monarch_slurm.train.state.snapshot` returned so that ``path`` is whole, and on the disk, or absent.

    A write that fails leaves neither a part of the file nor an empty folder.

    Returns:
        The sha256 of the state and the size of the file in bytes.

    Raises:
        SavedStateError: it cannot be written.
    """
    from monarch_slurm.train import state

    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        make_folders(path.parent)
        aside.unlink(missing_ok=True)  # of a process that had the same number
        with open(create_owned(aside), "wb") as file:
            file.write(state.encode_header(copy))
            for tensor in state.tensors(copy):
                file.write(state.raw_bytes(tensor))
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        aside.replace(path)
        _sync_folder(path.parent)
    except FileRefusedError as error:
        raise SavedStateError(f"cannot save the state: {error}") from None
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        _remove_empty(path.parent)
        raise SavedStateError(f"cannot save the state in {path}: {error.strerror}") from error
    return state.digest(copy), size


def read_state(path: Path, sha256: str) -> Any:
    """Return the snapshot in ``path``.

    Raises:
        SavedStateError: it cannot be read, or is not what was saved.
    """
    from monarch_slurm.train import state

    try:
        with open_owned(path, "to continue from it") as file:

            def fill(buffer: memoryview) -> None:
                done = 0
                while done < len(buffer):
                    count = file.readinto(buffer[done:])
                    if not count:
                        raise SavedStateError(f"the saved state {path} is cut short")
                    done += count

            tree = state.read_snapshot(fill)
    except FileRefusedError as error:
        raise SavedStateError(str(error)) from None
    except OSError as error:
        raise SavedStateError(f"cannot read the saved state {path}: {error.strerror}") from error
    except state.StateError as error:
        raise SavedStateError(f"the saved state {path} is damaged: {error}") from error
    if state.digest(tree) != sha256:
        raise SavedStateError(
            f"the saved state {path} is damaged: its hash is not that of what was saved; remove it to go on from the "
            "state before, if there is one"
        )
    return tree


def mark_saved(saved: SavedState, keep: int = 1) -> None:
    """Make ``saved`` the state that the run goes on from; remove all older ones but the newest ``keep - 1``.

    Raises:
        SavedStateError: the run's folder cannot be written.
    """
    folder = Path(saved.folder)
    path = folder / SAVED_FILE
    older = [state for state in _named(folder) if state.step < saved.step][: keep - 1]
    fields = [
        {
            "step": state.step,
            "replica": state.replica,
            "sha256": state.sha256,
            "bytes": state.sizes,
            "inputs": dict(state.inputs),
        }
        for state in (saved, *older)
    ]
    try:
        write_whole(path, json.dumps({"states": fields}).encode())
        _sync_folder(folder)
    except FileRefusedError as error:
        raise SavedStateError(f"cannot save the state: {error}") from None
    except OSError as error:
        raise SavedStateError(f"cannot save the state in {path}: {error.strerror}") from error
    kept = {state.step for state in older}
    for old in (folder / _FOLDER).iterdir():
        match = _STEP.fullmatch(old.name)
        if match is not None and int(match.group(1)) < saved.step and int(match.group(1)) not in kept:
            shutil.rmtree(old, ignore_errors=True)


def remove_unused(folder: Path, replica: int | None = None, step: int | None = None) -> None:
    """Remove saved files from which no run can go on: those of the run in ``folder`` that ``state.json`` does not name.

    Nobody may be writing them: a save that is under way is not named yet.

    Args:
        replica: whose files; None means those of all.
        step: of which save; None means all of them.

    Raises:
        SavedStateError: ``state.json`` makes no sense; nothing is removed.
    """
    used = {(state.step, state.replica) for state in _named(folder)}
    for parent in (folder / _FOLDER).glob("step-*"):
        match = _STEP.fullmatch(parent.name)
        if match is None or step not in (None, int(match.group(1))):
            continue
        for path in parent.glob("replica-*" if replica is None else f"replica-{replica}"):
            number = path.name.removeprefix("replica-")
            if number.isdecimal() and (int(match.group(1)), int(number)) not in used:
                shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            parent.rmdir()


def remove_file(path: Path) -> None:
    """Remove the file of one rank, and the folders that it leaves empty."""
    with contextlib.suppress(OSError):
        path.unlink()
    _remove_empty(path.parent)


def _remove_empty(of_replica: Path) -> None:
    """Remove the folder of one replica's save, and that of its step, if nothing is in them."""
    with contextlib.suppress(OSError):
        of_replica.rmdir()
        of_replica.parent.rmdir()


def find_saved(folder: Path) -> SavedState | None:
    """Return the newest state that the run in ``folder`` can go on from; None if none was saved.

    A state whose files are not all there, and as long as they were, is passed over. That their content is what was
    saved is seen when they are read.

    Raises:
        SavedStateError: ``state.json`` makes no sense, or no state that it names is whole.
    """
    states = _named(folder)
    missing = [state.missing() for state in states]
    for state, path in zip(states, missing, strict=True):
        if path is None:
            return state
    if not states:
        return None
    raise SavedStateError(
        f"no saved state of the run in {folder} is whole: {missing[0]} is cut short or not there; "
        f"remove {folder / SAVED_FILE} to begin the run anew"
    )


def how_to_continue(folder: Path) -> str:
    """Return a line that says whether and how the run in ``folder``, which has ended early, can continue."""
    try:
        saved = find_saved(folder)
    except SavedStateError as error:
        return str(error)
    if saved is None:
        return f"the run in {folder} has saved no state (--save-every N saves on the way): it can only begin anew"
    return f"saved at sync {saved.step}; to continue: the same command with --resume {folder}"


def _named(folder: Path) -> list[SavedState]:
    """Return the states that ``state.json`` names, the newest first."""
    path = folder / SAVED_FILE
    try:
        return [
            SavedState(
                str(folder.absolute()),
                int(told["step"]),
                int(told["replica"]),
                tuple(map(str, told["sha256"])),
                tuple(map(int, told["bytes"])),
                tuple((str(name), str(digest)) for name, digest in told.get("inputs", {}).items()),
            )
            for told in owned_json(path, "to continue from what it names", limit=LARGE_BYTES)["states"]
        ]
    except FileNotFoundError:
        return []
    except FileRefusedError as error:
        raise SavedStateError(f"{error}; remove it to begin the run anew") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise SavedStateError(
            f"{path} does not name saved states ({error!r}); remove it to begin the run anew"
        ) from None


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
