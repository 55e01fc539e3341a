"""Private folders for Unix sockets, which are gone when their process is, or at the latest when the next one starts.

A process holds a lock on its folder (flock(2)) for as long as it lives. A process that is killed cannot remove its
folder; the next process of the same user that makes one finds it unlocked, and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from monarch_slurm.config import settings
from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.owned_files import describe

MAX_SOCKET_PATH = 107
"""Bytes of a Unix socket's path (``sun_path`` of unix(7), less the closing zero)."""

SOCKET_NAME = "agent.sock"

_RANDOM_PART = "x" * 8
"""As long as what mkdtemp puts behind the prefix."""

_locks: dict[Path, int] = {}


class SocketPathError(MonarchSlurmError):
    """A folder for Unix sockets cannot be used."""


def make_runtime_dir() -> Path:
    """Make and return a private folder (mode 0700) for this process's Unix sockets.

    ``/tmp`` is taken where ``$XDG_RUNTIME_DIR`` cannot be written to or is too long for sockets; where the setting
    ``runtime_dir`` is so, that is an error.

    Raises:
        SocketPathError: it cannot be made there, or the paths of sockets in it would be too long.
    """
    base, prefix = _base(), _prefix()
    try:
        folder = _make_locked(base, prefix)
    except OSError as error:
        raise SocketPathError(
            f"cannot make a folder for sockets in {base}: {error.strerror}; set MONARCH_SLURM_RUNTIME_DIR to a short, "
            "writable local folder"
        ) from None
    try:
        check_socket_path(folder / SOCKET_NAME)
    except SocketPathError:
        remove_runtime_dir(folder)
        raise
    sweep_runtime_dirs()
    return folder


def check_runtime_dir() -> None:
    """Make sure that `make_runtime_dir` can make a folder.

    Raises:
        SocketPathError: it cannot.
    """
    remove_runtime_dir(make_runtime_dir())


def remove_runtime_dir(folder: Path) -> None:
    """Remove a folder that `make_runtime_dir` made."""
    shutil.rmtree(folder, ignore_errors=True)
    lock = _locks.pop(folder, None)
    if lock is not None:
        os.close(lock)


def check_socket_path(path: Path) -> None:
    """Make sure that ``path`` can be that of a Unix socket.

    Raises:
        SocketPathError: the path is too long for a Unix socket.
    """
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH:
        raise SocketPathError(
            f"the socket path {path} has {length} bytes, and Unix sockets allow {MAX_SOCKET_PATH}; set "
            "MONARCH_SLURM_RUNTIME_DIR to a short folder such as /tmp"
        )


def _is_short(folder: Path) -> bool:
    return len(os.fsencode(folder / SOCKET_NAME)) <= MAX_SOCKET_PATH


def check_private(folder: Path) -> None:
    """Make sure that ``folder`` is a real folder of ours that nobody else can enter.

    Raises:
        SocketPathError: it is not.
    """
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise SocketPathError(
            f"{folder} {describe(info)}: it is not a private folder of yours (mode 0700); refusing to use sockets in it"
        )


def _make_locked(base: Path, prefix: str) -> Path:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        # Between these calls another process may sweep the folder away: it is ours only if it is still there.
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            _locks[folder] = lock
            return folder
        os.close(lock)


def runtime_dirs() -> Iterator[Path]:
    """Yield the private folders of this user's processes on this machine, those of processes that were killed, too."""
    standard = (os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{os.getuid()}", "/tmp")  # noqa: S108
    bases = dict.fromkeys([_base(), *(Path(base) for base in standard if base)])
    for base in bases:
        # The agent of a node of a job has its folder in that of the process that watches it.
        for pattern in (f"{_prefix()}*", f"{_prefix()}*/{_prefix()}*"):
            for folder in base.glob(pattern):
                with contextlib.suppress(OSError, SocketPathError):  # it went away meanwhile, or is not ours
                    check_private(folder)
                    yield folder


def sweep_runtime_dirs() -> None:
    """Remove the folders of `make_runtime_dir` whose process is gone."""
    for folder in _base().glob(f"{_prefix()}*"):
        sweep_away(folder)


def _base() -> Path:
    configured = settings().runtime_dir
    base = Path(configured or os.environ.get("XDG_RUNTIME_DIR") or "/tmp")  # noqa: S108 - mkdtemp makes the name
    if configured or (os.access(base, os.W_OK | os.X_OK) and _is_short(base / f"{_prefix()}{_RANDOM_PART}")):
        return base
    return Path("/tmp")  # noqa: S108


def _prefix() -> str:
    return f"ms-{os.getuid()}-"


def sweep_away(folder: Path) -> None:
    """Remove a folder that a process made with `make_runtime_dir`, if that process is gone."""
    if not folder.name.startswith(_prefix()):
        return
    with contextlib.suppress(OSError, SocketPathError):  # it went away meanwhile, is locked, or is not ours
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            check_private(folder)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
