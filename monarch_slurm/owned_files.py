"""Opening files so that another user of the machine can neither feed this program nor have it write elsewhere.

What is unpickled, executed or believed must be a regular file of this user or of root that nobody else may write.
What is written is made anew under its own name, or appended to a file of this user. A link that somebody else has made
is followed nowhere as the file itself; as a folder on the way only where the kernel would follow it, too
(``protected_symlinks`` of proc_sys_fs(5)): the link belongs to the owner of the folder that it is in.

What is checked is what is opened: owner and mode are those of the open descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from monarch_slurm.errors import MonarchSlurmError

SMALL_BYTES = 1 << 20
"""Largest state file of ours that holds no list which grows with the run."""

LARGE_BYTES = 1 << 30

_OTHERS_WRITE = 0o022
_OTHERS_REACH = 0o077
_MOST_LINKS = 40  # as Linux


class FileRefusedError(MonarchSlurmError):
    """A file or folder is not used; the text names it, its owner and mode if these are why, and what to do."""


def user_name(uid: int) -> str:
    """Return the name of a user with the number, such as ``"alice (uid 1000)"``."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def describe(info: os.stat_result) -> str:
    """Return owner and mode in words."""
    return f"belongs to {user_name(info.st_uid)} and has mode {stat.S_IMODE(info.st_mode):04o}"


def check_info(path: Path, info: os.stat_result, use: str, *, private: bool = False, root: bool = True) -> None:
    """Make sure that only this user, or root, may have written what ``info`` tells of.

    Args:
        use: what is not done otherwise, such as ``"to load it"``.
        private: nobody else may read it either.
        root: whether it may belong to root.

    Raises:
        FileRefusedError: somebody else may have.
    """
    me = os.getuid()
    if info.st_uid != me and not (root and info.st_uid == 0):
        raise FileRefusedError(
            f"{path} {describe(info)}; you are {user_name(me)}: refusing {use}. Remove it, or use a place of your own"
        )
    shared = stat.S_IMODE(info.st_mode) & (_OTHERS_REACH if private else _OTHERS_WRITE)
    if shared and (private or not _is_in_private_folder(path, info)):
        change, right = ("go-rwx", "reach") if private else ("go-w", "write")
        raise FileRefusedError(
            f"{path} {describe(info)}: others can {right} it; refusing {use}. If its content is yours: chmod {change} "
            f"{path}"
        )


def _is_in_private_folder(path: Path, info: os.stat_result) -> bool:
    """Return whether nobody else comes to a file, whatever its mode says: a umask of 002 or 000 made it so."""
    if not stat.S_ISREG(info.st_mode):
        return False
    folder = os.stat(path.parent)
    return folder.st_uid == os.getuid() and not stat.S_IMODE(folder.st_mode) & _OTHERS_REACH


def check_folder(path: Path, use: str, *, root: bool = True) -> None:
    """Make sure that ``path`` is a folder in which only this user, or root, can put files.

    Raises:
        FileRefusedError: it is not.
        FileNotFoundError: there is nothing.
    """
    info = os.stat(followed(path))
    if not stat.S_ISDIR(info.st_mode):
        raise FileRefusedError(f"{path} is not a folder: refusing {use}")
    check_info(path, info, use, root=root)


def followed(path: Path) -> Path:
    """Return the absolute path behind the links on the way to ``path``, which need not exist, and behind its own.

    Raises:
        FileRefusedError: a link of somebody else is among them, or there are too many.
    """
    parts = [part for part in Path(os.path.join(os.getcwd(), path)).parts[1:] if part != "."]
    parts.reverse()
    found, links = Path("/"), 0
    while parts:
        part = parts.pop()
        if part == "..":
            found = found.parent
            continue
        step = found / part
        try:
            info = os.lstat(step)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return step.joinpath(*reversed(parts))  # whoever opens it is told what is wrong
        if not stat.S_ISLNK(info.st_mode):
            found = step
            continue
        _check_link(path, step, info, on_the_way=bool(parts))
        links += 1
        if links > _MOST_LINKS:
            raise FileRefusedError(f"{path}: too many links on the way")
        target = Path(os.readlink(step))
        if target.is_absolute():
            found = Path("/")
        parts += reversed([part for part in target.parts if part not in ("/", ".")])
    return found


def _check_link(path: Path, link: Path, info: os.stat_result, *, on_the_way: bool) -> None:
    if info.st_uid in (os.getuid(), 0):
        return
    if on_the_way and os.stat(link.parent).st_uid == info.st_uid:
        return
    where = "" if link == path else f"{path}: "
    raise FileRefusedError(
        f"{where}{link} is a link that belongs to {user_name(info.st_uid)}; you are {user_name(os.getuid())}: refusing "
        "to follow it. Remove it, or use a place of your own"
    )


@contextlib.contextmanager
def open_owned(path: Path, use: str, *, private: bool = False, root: bool = True) -> Iterator[io.BufferedReader]:
    """Open a file for reading that only this user, or root, may have written; see `check_info`.

    Raises:
        FileRefusedError: it is not such a file, or cannot be read.
        FileNotFoundError: there is nothing.
    """
    with _open(path, followed(path), os.O_NOFOLLOW) as file:
        check_info(path, os.fstat(file.fileno()), use, private=private, root=root)
        yield file


def read_owned(path: Path, use: str, *, limit: int = SMALL_BYTES, private: bool = False, root: bool = True) -> bytes:
    """Return the content of such a file, of ``limit`` bytes at most.

    Raises:
        FileRefusedError: it is not such a file, cannot be read, or is larger.
        FileNotFoundError: there is nothing.
    """
    with open_owned(path, use, private=private, root=root) as file:
        return _read(path, file, limit)


def read_data(path: Path, *, limit: int = SMALL_BYTES) -> bytes:
    """Return the content of a file of anybody's, which is data: nothing is unpickled, executed or decided by it.

    Raises:
        FileRefusedError: it is no regular file, cannot be read, or has more than ``limit`` bytes.
        FileNotFoundError: there is nothing.
    """
    with _open(path, path, 0) as file:
        return _read(path, file, limit)


def owned_text(path: Path, use: str, *, limit: int = SMALL_BYTES) -> str:
    """Return `read_owned` as text.

    Raises:
        FileRefusedError: as `read_owned`, or it is not text.
        FileNotFoundError: there is nothing.
    """
    return _text(path, read_owned(path, use, limit=limit))


def owned_json(path: Path, use: str, *, limit: int = SMALL_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file of this user's.

    Raises:
        FileRefusedError: as `read_owned`, or it holds no JSON object.
        FileNotFoundError: there is nothing.
    """
    return json_object(path, read_owned(path, use, limit=limit))


def json_object(path: Path, data: bytes) -> dict[str, Any]:
    """Return the JSON object in ``data``, the content of ``path``.

    Raises:
        FileRefusedError: it holds none.
    """
    if not data.strip():
        raise FileRefusedError(f"{path} is empty")
    try:
        found = json.loads(_text(path, data))
    except RecursionError:
        raise FileRefusedError(f"{path} is not JSON of ours: it is nested too deeply") from None
    except ValueError as error:
        raise FileRefusedError(f"{path} is not JSON ({error}); was it cut short?") from None
    if not isinstance(found, dict):
        raise FileRefusedError(f"{path} is JSON, but not an object: {type(found).__name__}")
    return found


def _text(path: Path, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise FileRefusedError(f"{path} is not text ({error})") from None


@contextlib.contextmanager
def _open(path: Path, real: Path, flags: int) -> Iterator[io.BufferedReader]:
    try:
        # O_NONBLOCK: a pipe under this name would hold the program up
        fd = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise FileRefusedError(f"cannot read {path}: {error.strerror}{_of_whom(real, error)}") from None
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise FileRefusedError(f"{path} is {'a folder' if stat.S_ISDIR(mode) else 'no regular file'}: not read")
        with open(fd, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(fd)


def _of_whom(path: Path, error: OSError) -> str:
    if error.errno not in (errno.EACCES, errno.EPERM):
        return ""
    try:
        return f"; it {describe(os.lstat(path))}"
    except OSError:
        return ""


def _read(path: Path, file: io.BufferedReader, limit: int) -> bytes:
    try:
        data = file.read(limit + 1)
    except OSError as error:
        raise FileRefusedError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > limit:
        raise FileRefusedError(f"{path} has more than {limit} bytes: not what was written there")
    return data


def create_owned(path: Path, mode: int = 0o600) -> int:
    """Make the file ``path``, which must not exist, not even as a link; return a descriptor to write it by.

    Raises:
        FileExistsError: something has this name.
        OSError: it cannot be made.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def append_owned(path: Path, mode: int = 0o600, *, read: bool = False) -> int:
    """Open a file of this user's to append to, or make it; return the descriptor.

    A link that this user or root has made is followed.

    Args:
        read: for reading, too, and for writing anywhere in it.

    Raises:
        FileRefusedError: it is no regular file of this user's.
        OSError: it cannot be made or opened.
    """
    flags = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    flags |= os.O_RDWR if read else os.O_WRONLY | os.O_APPEND
    real = followed(path)
    try:
        fd = os.open(real, flags, mode)
    except PermissionError as error:
        raise PermissionError(error.errno, f"{error.strerror}{_of_whom(real, error)}", str(path)) from None
    info = os.fstat(fd)
    problem = ""
    if not stat.S_ISREG(info.st_mode):
        problem = "is no regular file: refusing to write to it"
    elif info.st_uid != os.getuid():
        problem = (
            f"{describe(info)}; you are {user_name(os.getuid())}: refusing to write to it. Remove it, or use a place "
            "of your own"
        )
    if problem:
        os.close(fd)
        raise FileRefusedError(f"{path} {problem}")
    return fd


def write_whole(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write ``path`` so that a reader sees the whole content or the old one, even after a power loss.

    What had this name before, a link of anybody's among them, is replaced and never written to.

    Raises:
        FileRefusedError: the way to it leads over a link of somebody else.
        OSError: it cannot be written.
    """
    real = followed(path.parent) / path.name
    fd, aside = tempfile.mkstemp(dir=real.parent, prefix=f".{real.name[:64]}.")  # O_EXCL, O_NOFOLLOW, 0600
    try:
        with open(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(aside, real)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        if isinstance(error, PermissionError):  # it is another user's, in a folder with the sticky bit
            raise PermissionError(error.errno, f"{error.strerror}{_of_whom(real, error)}", str(path)) from None
        raise


def make_folders(path: Path, mode: int = 0o700) -> None:
    """Make a folder and those that it is to be in, whatever the umask allows others: ``mode`` is all that they get.

    Raises:
        FileRefusedError: the way to it leads over a link of somebody else.
        OSError: one cannot be made.
    """
    real = followed(path)
    for folder in (*reversed(real.parents), real):
        if folder.is_dir():
            continue
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=mode)
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
