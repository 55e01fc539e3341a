"""Files that somebody else could have written are not used, and nothing is written where a stranger's link leads."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from users import SOMEBODY, STRANGER, as_user, only_root

from monarch_slurm.owned_files import (
    FileRefusedError,
    append_owned,
    check_folder,
    create_owned,
    followed,
    make_folders,
    owned_json,
    read_data,
    read_owned,
    write_whole,
)

pytestmark = only_root


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder as /tmp: everybody may write, and remove only what is theirs."""
    folder = Path(tempfile.mkdtemp(prefix="ms-shared-", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def refusal(uid: int, function: Callable[[], object]) -> str:
    """What user ``uid`` is told when the file is refused; empty if it is not."""

    def tried() -> str:
        try:
            function()
        except FileRefusedError as error:
            return str(error)
        return ""

    return str(as_user(uid, tried))


def made(path: Path, uid: int, mode: int = 0o600, content: bytes = b"{}") -> Path:
    path.write_bytes(content)
    os.chown(path, uid, uid)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("owner", "mode", "why"),
    [
        (SOMEBODY, 0o600, ""),
        (SOMEBODY, 0o644, ""),
        (SOMEBODY, 0o664, "others can write it"),
        (SOMEBODY, 0o602, "others can write it"),
        (STRANGER, 0o644, f"belongs to uid {STRANGER} and has mode 0644; you are uid {SOMEBODY}"),
        (0, 0o644, ""),
        (0, 0o666, "others can write it"),
        (0, 0o600, "Permission denied; it belongs to root (uid 0) and has mode 0600"),
    ],
)
def test_what_is_loaded_is_of_this_user_or_of_root(shared: Path, owner: int, mode: int, why: str) -> None:
    path = made(shared / "file", owner, mode)
    said = refusal(SOMEBODY, lambda: read_owned(path, "to load it"))
    assert (why in said and str(path) in said) if why else said == ""
    assert "\n" not in said


def test_root_takes_files_of_its_own_alone(shared: Path) -> None:
    path = made(shared / "file", SOMEBODY)
    with pytest.raises(FileRefusedError, match=f"belongs to uid {SOMEBODY}"):
        read_owned(path, "to load it")
    assert read_data(path) == b"{}", "data may be of anybody"


def test_keys_are_for_their_owner_alone(shared: Path) -> None:
    mine, root = made(shared / "mine", SOMEBODY, 0o640), made(shared / "root", 0, 0o644)
    assert "others can reach it" in refusal(SOMEBODY, lambda: read_owned(mine, "its keys", private=True))
    assert "root (uid 0)" in refusal(SOMEBODY, lambda: read_owned(root, "its keys", root=False))


def test_in_a_private_folder_a_mode_that_a_umask_left_does_no_harm(shared: Path) -> None:
    folder = shared / "private"
    folder.mkdir(0o700)
    os.chown(folder, SOMEBODY, SOMEBODY)
    path = made(folder / "file", SOMEBODY, 0o666)
    assert refusal(SOMEBODY, lambda: read_owned(path, "to load it")) == ""
    folder.chmod(0o711)
    assert "others can write it" in refusal(SOMEBODY, lambda: read_owned(path, "to load it"))


@pytest.mark.parametrize("link_owner", [SOMEBODY, STRANGER, 0])
def test_a_link_is_followed_only_if_this_user_or_root_has_made_it(shared: Path, link_owner: int) -> None:
    target = made(shared / "target", SOMEBODY)
    link = shared / "link"
    link.symlink_to(target)
    os.lchown(link, link_owner, link_owner)
    uses: list[Callable[[], object]] = [
        lambda: read_owned(link, "to load it"),
        lambda: os.close(append_owned(link)),
        lambda: followed(link),
    ]
    for use in uses:
        said = refusal(SOMEBODY, use)
        if link_owner == STRANGER:
            assert f"{link} is a link that belongs to uid {STRANGER}; you are uid {SOMEBODY}" in said
        else:
            assert said == ""


def test_a_strangers_link_on_the_way_is_followed_as_the_kernel_does(shared: Path) -> None:
    """In a folder with the sticky bit not; in a folder of its maker, who could put anything there anyway, it is."""
    (shared / "real").mkdir()
    made(shared / "real" / "file", SOMEBODY)
    (shared / "theirs").mkdir()
    for folder in (shared, shared / "theirs"):
        link = folder / "way"
        link.symlink_to(shared / "real")
        os.lchown(link, STRANGER, STRANGER)
    os.chown(shared / "theirs", STRANGER, STRANGER)
    assert refusal(SOMEBODY, lambda: read_owned(shared / "theirs" / "way" / "file", "to load it")) == ""
    for use in (
        lambda: read_owned(shared / "way" / "file", "to load it"),
        lambda: write_whole(shared / "way" / "new", b""),
        lambda: check_folder(shared / "way", "to use it"),
        lambda: make_folders(shared / "way" / "new"),
    ):
        assert f"{shared}/way is a link that belongs to uid {STRANGER}" in refusal(SOMEBODY, use)
    assert not (shared / "real" / "new").exists()


def test_nothing_is_written_through_a_link_or_into_a_strangers_file(shared: Path) -> None:
    precious = made(shared / "precious", SOMEBODY, content=b"precious")
    for name in ("link", "dangling"):
        (shared / name).symlink_to(precious if name == "link" else shared / "nothing")
        os.lchown(shared / name, STRANGER, STRANGER)
    made(shared / "theirs", STRANGER, 0o666, b"theirs")
    os.mkfifo(shared / "pipe")
    os.chown(shared / "pipe", SOMEBODY, SOMEBODY)

    def tries() -> list[str]:
        said = []
        for name in ("link", "dangling", "theirs", "pipe"):
            for write in (append_owned, create_owned, lambda path: write_whole(path, b"new")):
                if name == "pipe" and write not in (append_owned, create_owned):
                    continue
                try:
                    fd = write(shared / name)
                except (FileRefusedError, OSError) as error:
                    said.append(f"{name}: {type(error).__name__}")
                else:
                    said.append(f"{name}: {fd}")
        return said

    assert as_user(SOMEBODY, tries) == [
        "link: FileRefusedError", "link: FileExistsError", "link: PermissionError",
        "dangling: FileRefusedError", "dangling: FileExistsError", "dangling: PermissionError",
        "theirs: FileRefusedError", "theirs: FileExistsError", "theirs: PermissionError",
        "pipe: OSError", "pipe: FileExistsError",
    ]  # fmt: skip
    assert precious.read_bytes() == b"precious"
    assert (shared / "theirs").read_bytes() == b"theirs"
    assert not (shared / "nothing").exists()
    assert sorted(os.listdir(shared)) == ["dangling", "link", "pipe", "precious", "theirs"], "nothing is left aside"


def test_who_is_in_the_way_is_told(shared: Path) -> None:
    path = made(shared / "file", STRANGER, 0o644)

    def write() -> str:
        try:
            write_whole(path, b"new")
        except PermissionError as error:
            return str(error.strerror)
        return ""

    assert f"it belongs to uid {STRANGER} and has mode 0644" in as_user(SOMEBODY, write)


@pytest.mark.parametrize("umask", [0, 0o002, 0o077])
def test_the_umask_gives_nobody_more(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        make_folders(tmp_path / "a" / "b")
        make_folders(tmp_path / "a" / "b")
        make_folders(tmp_path / "c" / "d", 0o755)
        os.close(append_owned(tmp_path / "log"))
        os.close(create_owned(tmp_path / "new"))
        write_whole(tmp_path / "whole", b"")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    private, files = dict.fromkeys("ab", 0o700), dict.fromkeys(("log", "new", "whole"), 0o600)
    assert modes == {**private, **files, **dict.fromkeys("cd", 0o755 & ~umask)}


def test_the_way_to_a_file_is_that_of_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/b")
    (tmp_path / "chain").symlink_to("link")
    (tmp_path / "loop").symlink_to("loop")
    for path in ("a/b/x", "link/x", "chain/../x", "chain", "link/../../a", "a/./b", "none/x", "a/b/../../link"):
        assert followed(tmp_path / path) == Path(os.path.realpath(tmp_path / path)), path
    with pytest.raises(FileRefusedError, match="too many links"):
        followed(tmp_path / "loop")


def test_folders_in_which_others_put_files_are_refused(shared: Path) -> None:
    folder = shared / "folder"
    folder.mkdir()
    os.chown(folder, SOMEBODY, SOMEBODY)
    for mode, why in ((0o755, ""), (0o2755, ""), (0o2775, "others can write it"), (0o1777, "others can write it")):
        folder.chmod(mode)
        said = refusal(SOMEBODY, lambda: check_folder(folder, "to load what is in it"))
        assert (why in said) if why else said == ""
    assert "is not a folder" in refusal(SOMEBODY, lambda: check_folder(made(shared / "file", SOMEBODY), "to use it"))


DAMAGES = {
    "empty": b"",
    "blank": b" \n",
    "cut short": b'{"a": [1, 2',
    "list": b"[]",
    "null": b"null",
    "number": b"1" * 5000,
    "binary": bytes(range(256)),
    "zeros": bytes(512),
    "nested": b"[" * 200_000,
    "huge": b" " * (2 << 20),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_json_that_makes_no_sense_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(DAMAGES[damage])
    with pytest.raises(FileRefusedError) as raised:
        owned_json(path, "to use it")
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, why in (("folder", "is a folder"), ("pipe", "is no regular file")):
        for read in (lambda path: read_owned(path, "to use it"), read_data):
            with pytest.raises(FileRefusedError, match=f"{tmp_path}/{name} {why}"):
                read(tmp_path / name)
    for read in (lambda path: read_owned(path, "to use it"), read_data):
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "none")
