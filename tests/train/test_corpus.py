"""What a login node says of the training text is what trainers find, though it reads next to nothing of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_slurm.train.corpus import PROBE_BYTES, DataError, check_corpus
from monarch_slurm.train.data import Sampler, split_corpus

FakeSlurm = Callable[..., Path]


def of_trainers(data: str, seq_len: int, shards: int, batch_size: int) -> str:
    """What the trainers say of the text; nothing if it will do."""
    try:
        Sampler(split_corpus(data, seq_len), seed=0, shard=shards - 1, shards=shards, batch_size=batch_size)
    except DataError as error:
        return str(error)
    return ""


def of_check(data: str, seq_len: int, shards: int, batch_size: int) -> str:
    try:
        check_corpus(data, seq_len=seq_len, shards=shards, batch_size=batch_size)
    except DataError as error:
        return str(error)
    return ""


def lay_out(folder: Path) -> None:
    """Make files of all kinds in a folder."""
    (folder / "empty").touch()
    (folder / "image.png").write_bytes(b"\x89PNG\x00\x00")
    (folder / "text").write_text("a word " * 100)
    os.mkfifo(folder / "pipe")
    (folder / "no files").mkdir()
    (folder / "no text").mkdir()
    (folder / "no text" / "image.png").write_bytes(b"\x89PNG\x00\x00")
    (folder / "no text" / ".hidden").write_text("a word " * 100)
    (folder / "some text").mkdir()
    (folder / "some text" / "a").write_text("a word " * 60)
    (folder / "some text" / "b").write_bytes(b"\0" * 1000)
    (folder / "some text" / "c").write_text("a word " * 60)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "does not exist"),
        ("empty", "is empty"),
        ("image.png", "is not text"),
        ("pipe", "neither a file nor a folder"),
        ("no files", "(no files)"),
        ("no text", "(1 file, which is not text)"),
        ("text", ""),
        ("some text", ""),
    ],
)
def test_the_check_and_the_trainers_say_the_same(tmp_path: Path, name: str, said: str) -> None:
    lay_out(tmp_path)
    path = str(tmp_path / name)
    assert of_check(path, 16, 2, 2) == of_trainers(path, 16, 2, 2)
    assert said in of_check(path, 16, 2, 2)
    for case in ((16, 30, 4), (100, 1, 1)):
        assert of_check(path, *case) == of_trainers(path, *case) != ""


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 700), min_size=1, max_size=4),
    seq_len=st.integers(8, 16),
    shards=st.integers(1, 6),
    batch_size=st.integers(1, 4),
    one_file=st.booleans(),
)
def test_how_much_text_is_enough(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    seq_len: int,
    shards: int,
    batch_size: int,
    one_file: bool,
) -> None:
    folder = tmp_path_factory.mktemp("text")
    for number, size in enumerate(sizes):
        (folder / str(number)).write_bytes(b"x" * size)
    path = str(folder / "0") if one_file else str(folder)
    case = (seq_len, shards, batch_size)
    assert of_check(path, *case) == of_trainers(path, *case)


def test_a_huge_text_is_not_read(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with open(tmp_path / name, "wb") as file:
            file.write(b"x" * PROBE_BYTES)
            file.truncate(1 << 40)  # sparse: a terabyte that takes no room
    before = bytes_read()
    assert of_check(str(tmp_path / "a"), 8192, 4096, 64) == ""
    assert of_check(str(tmp_path), 8192, 4096, 64) == ""
    assert bytes_read() - before < 10 * PROBE_BYTES


def bytes_read() -> int:
    """Bytes that this process has read so far."""
    (line,) = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar:")]
    return int(line.split()[1])


WITHOUT_TORCH = """
import sys
sys.modules.update(dict.fromkeys(("torch", "numpy", "torchft")))  # a name without a module cannot be imported
from monarch_slurm.cli import main
main()
"""


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--nodes", "2", "--dry-run"], 0, " monarch_slurm train --in-job --data="),
        (["--local"], 1, 'training needs numpy; install it with: pip install "monarch_slurm[train]"'),
    ],
)
def test_a_login_node_needs_neither_torch_nor_numpy(
    tmp_path: Path, fake_slurm: FakeSlurm, arguments: list[str], code: int, said: str
) -> None:
    fake_slurm()
    (tmp_path / "text").write_text("a word " * 10000)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "train", "--data", "text", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
