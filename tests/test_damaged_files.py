"""State files of jobs and runs that are damaged: each is refused or ignored in one line that names it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from users import SOMEBODY, STRANGER, as_user, only_root

from monarch_slurm.controller import read_journal
from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.job import folder as job_folder
from monarch_slurm.job import job_load
from monarch_slurm.job.current import contexts, current_context
from monarch_slurm.job.folder import JobFolder
from monarch_slurm.job.head_lock import HEAD_FILE, HeadLock, read_head
from monarch_slurm.job.requested import cancel_all
from monarch_slurm.job.requeue import may_start_again
from monarch_slurm.job.session import _Owner
from monarch_slurm.job.sick import SICK_FILE, note_sick, sick_nodes
from monarch_slurm.train.positions import Positions
from monarch_slurm.train.report import load_report
from monarch_slurm.train.resuming import resumed_config
from monarch_slurm.train.run_lock import alone_in
from monarch_slurm.train.saved import find_saved, read_state
from monarch_slurm.wire import AdminClient, read_invitation
from monarch_slurm.wire.shared_key import choose_secret

pytestmark = only_root

EVENTS = [
    {"kind": "run_started", "t": 1.0, "config": {"model": "tiny", "replicas": 2, "tokens": 5}},
    {"kind": "sync", "t": 2.0},
]
HEAD = {"id": "1", "node": "n1", "pid": 5, "restarts": 0, "started": 1.0, "beat": 1}
SICK = {"n1": {"at": 1.0, "why": "lost", "seconds": 600.0, "silences": 1, "by_silence": True}}
STATE = {"states": [{"step": 2, "replica": 0, "sha256": ["00"], "bytes": [4], "inputs": {"data": "00"}}]}
KEYS = dict.fromkeys(("server_public", "agent_public", "agent_secret"), "k" * 40)
INVITATION = {"address": "tcp://127.0.0.1:1", **KEYS}
REPORT = {"schema": 1, "summary": {}, "failures": [], "curves": {}, "replicas": [], "events": []}


def beside_a_journal(read: Callable[[Path], object]) -> Callable[[Path], object]:
    def with_journal(path: Path) -> object:
        (path.parent / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
        return read(path)

    return with_journal


def in_folder(read: Callable[[], object]) -> Callable[[Path], object]:
    def there(path: Path) -> object:
        before = os.open(".", os.O_PATH)
        os.chdir(path.parents[2] if path.name == "spec" else path.parents[1])
        try:
            return read()
        finally:
            with contextlib.suppress(PermissionError):  # as another user
                os.fchdir(before)
            os.close(before)

    return there


def take_head(path: Path) -> None:
    clock = iter(range(10_000))
    HeadLock(path.parent, "n2", 1, lambda: float(next(clock))).take(lambda seconds: None)


def lock(path: Path) -> None:
    with alone_in(path.parent):
        pass


def ask(path: Path) -> None:
    with AdminClient(path.parent):
        pass


READERS: dict[str, tuple[str, object, Callable[[Path], object]]] = {
    "sick nodes": (SICK_FILE, SICK, lambda path: sick_nodes(path.parent, 2.0)),
    "sick nodes, noted": (SICK_FILE, SICK, lambda path: note_sick(path.parent, {"n2": "lost"}, now=2.0)),
    "head": (HEAD_FILE, HEAD, lambda path: read_head(path.parent)),
    "head, taken": (HEAD_FILE, HEAD, take_head),
    "exit code": ("exit_code", 3, lambda path: JobFolder(path.parent).exit_code()),
    "notice": ("notice", "text", lambda path: JobFolder(path.parent).notice()),
    "kills": ("quick_kills", 1, lambda path: may_start_again(JobFolder(path.parent), 1.0)),
    "session": (".session-1", {"folder": "/", "host": "", "pid": 1, "started": 1.0}, _Owner.read),
    "requested job": ("more/1/job_id", 5, lambda path: cancel_all(JobFolder(path.parents[2]))),
    "job": ("job.pkl", "", lambda path: job_load(str(path))),
    "specification": (".monarch/default/spec", "a.b", in_folder(contexts)),
    "context": (".monarch/job_state.pkl", "", in_folder(current_context)),
    "invitation": ("controller.json", INVITATION, read_invitation),
    "admin invitation": ("admin.json", INVITATION, ask),
    "worker key": ("key", "k" * 64, lambda path: choose_secret(path, None)),
    "journal": ("journal.jsonl", EVENTS[0], read_journal),
    "journal, resumed": ("journal.jsonl", EVENTS[0], lambda path: resumed_config(path.parent, {})),
    "report": ("report.json", REPORT, load_report),
    "report, resumed": ("report.json", REPORT, beside_a_journal(lambda path: resumed_config(path.parent, {}))),
    "saved states": ("state.json", STATE, lambda path: find_saved(path.parent)),
    "saved states, resumed": (
        "state.json", STATE, beside_a_journal(lambda path: resumed_config(path.parent, {"tokens": 10**9})),
    ),
    "saved state": ("rank-0.state", "", lambda path: read_state(path, "00")),
    "position": (
        "positions/replica-0/rank-0/step-1.json", {}, lambda path: Positions(str(path.parents[3]), 0, 0, 0, 1).read(1),
    ),
    "lock": ("run.lock", 5, lock),
}  # fmt: skip
"""Every state file that is read: its name, what it may hold, and who reads it."""


def wrong_types(good: object) -> Iterator[object]:
    """Values like ``good`` in which one thing at a time has another type, is missing, unknown or out of all bounds."""
    others: list[object] = [None, True, -1, 10**400, 1e300, float("nan"), "", "x\0y", [], {}, [[]], {"a": {"b": None}}]
    yield from others
    if isinstance(good, dict):
        yield {**good, "unknown": 1}
        for key, value in good.items():
            yield {name: each for name, each in good.items() if name != key}
            yield from ({**good, key: each} for each in wrong_types(value))
    elif isinstance(good, list):
        for index, value in enumerate(good):
            yield from ([*good[:index], each, *good[index + 1 :]] for each in wrong_types(value))


def contents(good: object) -> Iterator[bytes]:
    text = json.dumps(good).encode()
    yield from (b"", b"\n", text[: len(text) // 2], text + b"\n" + text, b"\0" * 100, bytes(range(256)), b"[" * 100_000)
    yield from (
        b"9" * 5000,
        b"-1",
        b"1e400",
        b"\xff\xfe",
        b"\x80\x04.",
        b"\x80\x04N.",
        b"cos\nnothing\n.",
        b" " * (3 << 20),
    )
    for value in wrong_types(good):
        yield json.dumps(value).encode() + b"\n"


@pytest.fixture
def base() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ms-damaged-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def outcome(read: Callable[[Path], object], path: Path) -> list[str]:
    """Read; return the lines that a person gets to see, the error's among them. Anything but our errors is a fault."""
    lines = Lines()
    logger = logging.getLogger("monarch_slurm")
    logger.addHandler(lines)
    job_folder._told.clear()
    try:
        read(path)
    except MonarchSlurmError as error:
        lines.said.append(str(error))
    except FileNotFoundError:
        lines.said.append(str(path))  # callers take it for "there is none"
    finally:
        logger.removeHandler(lines)
    return lines.said


def is_told_well(said: list[str], path: Path) -> bool:
    return all("\n" not in line and "Traceback" not in line and len(line) < 1000 for line in said) and len(said) <= 2


@pytest.mark.parametrize("name", READERS)
def test_damaged_content(name: str, base: Path) -> None:
    """Whatever is in a file: nothing but an error of ours or a line of the log comes of it."""
    file, good, read = READERS[name]
    path = base / file
    path.parent.mkdir(parents=True, exist_ok=True)
    for content in contents(good):
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        path.chmod(0o600)
        said = outcome(read, path)
        assert is_told_well(said, path), (content[:100], said)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["folder", "pipe", "unreadable", "another user's", "everybody's", "a stranger's link"])
def test_something_else_of_this_name(name: str, kind: str, base: Path) -> None:
    """It is told, or ignored with a line, and left as it is."""
    file, good, read = READERS[name]
    path = base / file
    path.parent.mkdir(parents=True, exist_ok=True)
    content = (good if isinstance(good, str) else json.dumps(good)) + "\n"
    target = base / "elsewhere"
    target.write_text(content)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "a stranger's link":
        path.symlink_to(target)
    else:
        path.write_text(content)
    modes = {"unreadable": 0, "everybody's": 0o666, "another user's": 0o644}
    if kind in modes:
        path.chmod(modes[kind])
    for each in (base, *base.rglob("*")):
        os.lchown(each, SOMEBODY, SOMEBODY)
    if kind in ("another user's", "a stranger's link"):
        os.lchown(path, STRANGER, STRANGER)
    before = os.lstat(path)

    def tried() -> Any:
        return outcome(read, path)

    said = as_user(SOMEBODY, tried)
    assert is_told_well(said, path), said
    data = name in ("exit code", "notice", "kills", "requested job", "report", "head", "head, taken")
    refused = kind != "everybody's" or not name.startswith(("lock", "context", "head", "sick nodes, noted"))
    if refused and not (data and kind in ("another user's", "everybody's", "a stranger's link")) and name != "context":
        assert any(file in line for line in said), said
    now = os.lstat(base / file) if os.path.lexists(base / file) else None
    if now is None or now.st_ino != before.st_ino:
        assert name in ("kills", "head, taken", "sick nodes, noted"), "only what is written anew is replaced"
    assert target.read_text() == content, "nothing is written through a link"


def test_a_damaged_list_of_sick_nodes_is_kept_aside(base: Path) -> None:
    path = base / SICK_FILE
    path.write_text('{"n1": ')
    note_sick(base, {"n2": "lost"}, now=1.0)
    assert set(sick_nodes(base, 2.0)) == {"n2"}
    assert path.with_name(f"{SICK_FILE}.damaged").read_text() == '{"n1": '


def test_of_a_list_of_sick_nodes_what_makes_sense_is_used(base: Path) -> None:
    (base / SICK_FILE).write_text(json.dumps({**SICK, "n2": {"at": "yesterday"}, "n3": 7}))
    assert set(sick_nodes(base, 2.0)) == {"n1"}


def test_a_journal_with_a_damaged_line_keeps_all_others(base: Path) -> None:
    path = base / "journal.jsonl"
    path.write_bytes(
        json.dumps(EVENTS[0]).encode() + b'\n{"kind": "sy\0\n\xff\n' + json.dumps(EVENTS[1]).encode() + b"\n{"
    )
    path.chmod(0o600)
    lines: list[dict[str, Any]] = []
    said = outcome(lambda path: lines.extend(read_journal(path)), path)
    assert lines == EVENTS
    assert said == [f"{path}: 2 lines are damaged and left out, the first is line 2"]
