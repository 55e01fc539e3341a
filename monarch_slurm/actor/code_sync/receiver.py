"""A host's end of the copying: an actor in a proc of its own.

Files wait in a folder beside the others until all have come and have the right digests; then they are renamed into
place. Folders are entered one by one without following links, so that nothing outside of the target is written,
whatever is there. Only what was copied before is ever deleted.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from monarch_slurm.actor.actor import Actor
from monarch_slurm.actor.code_sync.tree import (
    RECORD,
    STAGE,
    Entry,
    Manifest,
    WorkspaceError,
    digest_of,
    leads_out,
    split_path,
)
from monarch_slurm.actor.code_sync.workspace import PREFIX_VARIABLE, WORKSPACE_VARIABLE
from monarch_slurm.actor.endpoint import endpoint

_agent_folder = Path()


def set_agent_folder(folder: Path) -> None:
    """Say which folder is the agent's, and gone when the agent is."""
    global _agent_folder
    _agent_folder = folder


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Receiver(Actor):
    """Keeps one host's copies."""

    def __init__(self) -> None:
        configured = os.environ.get(WORKSPACE_VARIABLE)
        self._root = Path(configured) if configured else _agent_folder / "workspace"
        self._target = _Target(self._root, ".")

    @endpoint
    def begin(self, place: str, manifest: Manifest) -> tuple[str, str, list[str]]:
        """Return the workspace's path here, the folder's in it, and which of its files this host lacks."""
        self._target = _Target(self._root, place)
        missing = self._target.begin(manifest)
        return os.path.realpath(self._root), os.path.realpath(self._target.path), missing

    @endpoint
    def begin_environment(self, prefix: str, manifest: Manifest) -> tuple[str, str, list[str]]:
        """As `begin`, for the conda environment that is active here and in the folder ``prefix``: the files of one
        hold its path, and so it is a copy at the same path only.
        """
        here = os.environ.get(PREFIX_VARIABLE, "")
        if os.path.realpath(here) != prefix or not here:
            active = f"that of {here}" if here else "none"
            raise WorkspaceError(
                f"host {socket.gethostname()}: the conda environment that is active there is {active}, and not that of "
                f"{prefix}, which is to be copied: activate it before the job's agents start"
            )
        self._target = _Target(Path(prefix), ".")
        return prefix, prefix, self._target.begin(manifest)

    @endpoint
    def write(self, pieces: list[tuple[str, int, bytes]]) -> None:
        """Take pieces of files: path, offset, data."""
        self._target.write(pieces)

    @endpoint
    def finish(self) -> tuple[list[str], list[str]]:
        """Put everything in place; return the paths of what was changed and deleted."""
        return self._target.finish()

    def __cleanup__(self, exc: Exception | None) -> None:
        """Leave nothing behind of what has not been finished."""
        self._target.discard()


class _Target:
    """One folder. What goes wrong is a `WorkspaceError`."""

    def __init__(self, root: Path, place: str) -> None:
        self._root = root
        self.path = root if place == "." else root.joinpath(*split_path(place))
        self._manifest: Manifest = {}
        self._missing: list[str] = []
        self._numbers: dict[str, int] = {}
        self._record: Manifest = {}
        self._stage = self.path / f"{STAGE}{socket.gethostname()}.{os.getpid()}"

    def begin(self, manifest: Manifest) -> list[str]:
        for path, entry in manifest.items():
            split_path(path)
            if entry.link and leads_out(path, entry.link):
                raise WorkspaceError(f"{path}: a link that leads out of the folder")
        with _told(self.path):
            self._make_folders()
            for left in self.path.glob(f"{STAGE}{socket.gethostname()}.*"):  # of a copying that was killed
                shutil.rmtree(left)
            self._record = self._read_record()
            self._manifest = {path: Entry(*entry) for path, entry in manifest.items()}
            self._missing = [path for path, entry in self._manifest.items() if not self._has(path, entry)]
            self._stage.mkdir(mode=0o700)
        files = [path for path in self._missing if not self._manifest[path].link]
        self._numbers = {path: number for number, path in enumerate(files)}
        return files

    def write(self, pieces: list[tuple[str, int, bytes]]) -> None:
        with _told(self.path):
            for path, offset, data in pieces:
                if path not in self._numbers:
                    raise WorkspaceError(f"{path!r} was not asked for")
                with open(self._stage / str(self._numbers[path]), "ab") as file:
                    if file.tell() != offset:
                        raise WorkspaceError(f"{path}: {offset} does not follow {file.tell()}")
                    file.write(data)

    def finish(self) -> tuple[list[str], list[str]]:
        with _told(self.path):
            for path, number in self._numbers.items():
                staged, entry = self._stage / str(number), self._manifest[path]
                if digest_of(str(staged)) != entry.digest:
                    raise WorkspaceError(f"{path} has changed while it was copied; synchronize again")
                os.chmod(staged, entry.mode)
                os.utime(staged, ns=(entry.mtime_ns, entry.mtime_ns))
            deleted = [path for path in self._record if path not in self._manifest and self._delete(path)]
            for path in self._missing:
                self._place(path, self._manifest[path])
            self._write_record()
        self.discard()
        return self._missing, deleted

    def discard(self) -> None:
        shutil.rmtree(self._stage, ignore_errors=True)

    def _make_folders(self) -> None:
        """Make the workspace and the folder in it; refuse what others could lead elsewhere."""
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in [self._root, *reversed(self.path.relative_to(self._root).parents), self.path]:
            folder = self._root / folder
            folder.mkdir(exist_ok=True, mode=0o700)
            info = folder.stat() if folder == self._root else folder.lstat()
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & stat.S_IWOTH:
                raise WorkspaceError(
                    f"host {socket.gethostname()}: {folder} is no folder of yours that only you can change: choose "
                    f"another one (${WORKSPACE_VARIABLE}), or remove it"
                )

    # ---- one file

    def _has(self, path: str, entry: Entry) -> bool:
        with contextlib.suppress(OSError), self._parent(path) as (folder, name):
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if entry.link:
                return stat.S_ISLNK(info.st_mode) and os.readlink(name, dir_fd=folder) == entry.link
            if not stat.S_ISREG(info.st_mode) or info.st_size != entry.size or info.st_mode & 0o777 != entry.mode:
                return False
            known = self._record.get(path)
            if known is not None and known.digest == entry.digest and info.st_mtime_ns == entry.mtime_ns:
                return True
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                return digest_of(fd) == entry.digest
            finally:
                os.close(fd)
        return False

    def _place(self, path: str, entry: Entry) -> None:
        with self._parent(path, make=True) as (folder, name):
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                    os.rmdir(name, dir_fd=folder)  # fails if something is in it that did not come from here
            if entry.link:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
                os.symlink(entry.link, name, dir_fd=folder)
            else:
                os.replace(self._stage / str(self._numbers[path]), name, dst_dir_fd=folder)
            self._drop_bytecode(folder, name)

    def _delete(self, path: str) -> bool:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            with self._parent(path) as (folder, name):
                os.unlink(name, dir_fd=folder)
                self._drop_bytecode(folder, name)
            parts = split_path(path)
            with contextlib.suppress(OSError):  # not empty
                for count in range(len(parts) - 1, 0, -1):
                    with self._parent("/".join(parts[:count])) as (above, name):
                        os.rmdir(name, dir_fd=above)
            return True
        return False

    @staticmethod
    def _drop_bytecode(folder: int, name: str) -> None:
        """Remove what Python has compiled of a source file: it tells changes by whole seconds only."""
        if not name.endswith(".py"):
            return
        with contextlib.suppress(OSError):
            cache = os.open("__pycache__", _FOLDER, dir_fd=folder)
            try:
                for compiled in os.listdir(cache):
                    if compiled.startswith(f"{name[:-3]}.") and compiled.endswith(".pyc"):
                        os.unlink(compiled, dir_fd=cache)
                os.rmdir("__pycache__", dir_fd=folder)
            finally:
                os.close(cache)

    @contextlib.contextmanager
    def _parent(self, path: str, make: bool = False) -> Iterator[tuple[int, str]]:
        """Yield the folder that ``path`` is in, opened without following links, and the last part of the path.

        Args:
            make: make folders that are not there, in place of links and files if need be.
        """
        *parts, name = split_path(path)
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parts:
                try:
                    inner = os.open(part, _FOLDER, dir_fd=folder)
                except OSError:
                    if not make:
                        raise
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(part, dir_fd=folder)
                    with contextlib.suppress(FileExistsError):  # another host with the same file system was first
                        os.mkdir(part, 0o755, dir_fd=folder)
                    inner = os.open(part, _FOLDER, dir_fd=folder)
                os.close(folder)
                folder = inner
            yield folder, name
        finally:
            os.close(folder)

    # ---- the record

    def _read_record(self) -> Manifest:
        try:
            fd = os.open(self.path / RECORD, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(fd, "rb") as file:
                record = {str(path): Entry(*entry) for path, entry in json.load(file).items()}
            for path in record:
                split_path(path)
        except (OSError, ValueError, TypeError, AttributeError, RecursionError, WorkspaceError):
            return {}  # none, or none of ours: everything is compared, and nothing is deleted
        return record

    def _write_record(self) -> None:
        aside = self._stage / "record"
        aside.write_text(json.dumps(self._manifest))
        os.replace(aside, self.path / RECORD)


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f"{error.filename} in {folder}" if error.filename else str(folder)
        raise WorkspaceError(f"host {socket.gethostname()}: cannot write {where}: {error.strerror}") from None
