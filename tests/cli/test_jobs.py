"""Commands about jobs without a cluster: wrong input, no Slurm, a training that is watched."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import run_command

from monarch_slurm.cli.status_view import span
from monarch_slurm.job.folder import JobFolder
from monarch_slurm.train.answers import answers_of
from monarch_slurm.train.config import TrainConfig
from monarch_slurm.train.live_state import RunState
from monarch_slurm.wire import AdminServer

FakeSlurm = Callable[..., Path]
SQUEUE = "echo 'RUNNING|2026-01-02T03:04:05|n[1-2]|None'"


@pytest.fixture(autouse=True)
def _outside_of_any_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM", "SBATCH", "MONARCH_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def call(*arguments: str) -> tuple[int, str]:
        code, text = run_command(monkeypatch, capsys, *arguments)
        assert "Traceback" not in text
        return code, text

    return call


Run = Callable[..., tuple[int, str]]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["submit", "train.py"], 2, "--nodes N, or --mesh NAME=N"),
        (["submit", "--nodes", "2", "--mesh", "a=1", "train.py"], 2, "--nodes and --mesh exclude each other"),
        (["submit", "--nodes", "2"], 2, "Missing argument 'PROGRAM...'"),
        (["submit", "--nodes", "0", "train.py"], 2, "x>=1"),
        (["submit", "--mesh", "a", "train.py"], 2, "NAME=VALUE expected"),
        (["submit", "--mesh", "a=b", "train.py"], 2, "no number of nodes"),
        (["submit", "--mesh", "1a=1", "train.py"], 2, "mesh name '1a'"),
        (["submit", "--nodes", "1", "--env", "X", "train.py"], 2, "NAME=VALUE expected"),
        (["submit", "--nodes", "1", "--time", "soon", "train.py"], 2, "time limit 'soon'"),
        (["submit", "--nodes", "1", "-f", "--json", "train.py"], 2, "--follow excludes"),
        (["submit", "--nodes", "1", "--dry-run", "true"], 1, "no Slurm here"),
        (["submit", "--nodes", "1", "true"], 1, "no Slurm here"),
        (["status"], 1, "no Slurm here"),
        (["status", "12"], 1, "no Slurm here"),
        (["status", "x"], 2, "neither a number of Slurm's nor the folder of a job"),
        (["logs", "12"], 1, "no Slurm here"),
        (["logs", "12", "--batch", "--rank", "1"], 2, "--batch excludes"),
        (["logs", "12", "--mesh", "w"], 2, "--mesh needs --rank"),
        (["cancel", "12"], 1, "no Slurm here"),
        (["cancel"], 2, "Missing argument 'JOB...'"),
        (["attach", "12"], 1, "no Slurm here"),
        (["shell"], 1, "start one with salloc"),
        (["shell", "--job", "12"], 1, "no Slurm here"),
    ],
)
def test_wrong_input_and_no_slurm_are_told_in_a_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, words: str
) -> None:
    monkeypatch.setenv("PATH", "")
    assert (got := run(*arguments))[0] == code, got
    assert words in got[1]
    if code == 1:
        assert got[1].count("\n") == 1
    assert os.listdir() == []


def test_logs_of_a_folder_are_read_without_slurm(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_job(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert run("logs", "12") == (0, f"nothing was printed yet: {folder.controller_log} is not there\n")
    folder.controller_log.write_text("hello\n")
    folder.host_log("n1").write_text("agent\n[n1 w-1 3] three\n")
    assert run("logs", str(folder.path)) == (0, "hello\n")
    assert run("logs", "12", "--host", "n1") == (0, "agent\n[n1 w-1 3] three\n")
    assert run("logs", "12", "--rank", "3") == (0, "[n1 w-1 3] three\n")
    folder.tell_proc_logs("")
    folder.tell_proc_logs(str(tmp_path / "files"))
    folder.tell_proc_logs(str(tmp_path / "files"))  # the next node says so, too
    said = f"procs write files of their own into {tmp_path}/files (log_dir), which is not here\n"
    assert run("logs", "12", "--rank", "3") == (0, "[n1 w-1 3] three\n" + said)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "n1.w-2.3.log").write_text("in a file\n")
    assert run("logs", "12", "--rank", "3") == (0, "[n1 w-1 3] three\n[n1 w-2 3] in a file\n")
    assert run("logs", "12", "--host", "n1")[1].endswith("[n1 w-2 3] in a file\n")


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_jobs_are_listed_with_folders_that_can_be_typed(
    run: Run, fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    folder = make_job(tmp_path)
    name = "a name that is not short at all"
    fake_slurm(
        squeue=f"echo '12|12|RUNNING|1:02|58:58|n[1-2]|None|{tmp_path}|{folder.batch_log}|{name}'",
    )
    if where == "elsewhere":
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
    code, said = run("status")
    _, line = said.splitlines()
    named = line.split()[-1]
    assert (code, named) == (0, "runs/12" if where == "here" else str(tmp_path / "runs" / "12"))
    assert Path(named).resolve() == folder.path
    assert name in line


def test_a_training_is_watched_from_its_events(run: Run, fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    fake_slurm(squeue=SQUEUE)
    folder = make_job(tmp_path)
    config = TrainConfig(model="tiny", replicas=2, tokens=1000)
    events: list[dict[str, Any]] = [
        {"kind": "run_started", "t": 1.0, "run": "night", "hosts": ["n1", "n2"], "config": config.to_dict()},
        {"kind": "detected", "t": 2.0, "replica": 1, "generation": 0, "cause": "Killed(sig=9)", "host": "n2"},
        {"kind": "run_finished", "t": 3.0, "ok": True, "reason": "all tokens trained"},
    ]
    state = RunState()
    for event in events:
        state.apply(event)
    answers = answers_of(SimpleNamespace(events=events), tmp_path / "night", config, state)  # type: ignore[arg-type]
    asked = []

    def training_events(since: int, brief: bool) -> Any:
        asked.append((since, brief))
        if since == len(events):
            folder.admin_file.unlink(missing_ok=True)
            raise RuntimeError("the run is over")
        return answers["training_events"](since, brief)

    census = {"controller": {"host": "n1", "pid": 7, "started": 0.0}, "hosts": [], "failures": []}
    known = {**answers, "training_events": training_events, "census": lambda: census}
    admin = AdminServer(folder.path, "127.0.0.1", known)
    try:
        code, said = run("status", "12")
        assert code == 0
        assert "training tiny: step 0, 0 of 1,000 tokens" in said
        assert "0 of 2 replicas take part" in said
        assert "program: pid 7 on n1" in said
        code, said = run("attach", "12")
    finally:
        admin.close()
    assert code == 0, said
    assert "run night started on 2 hosts" in said
    assert "Killed(sig=9)" in said
    assert "run finished: all tokens trained" in said
    assert (0, True) in asked
    assert asked[-1] == (len(events), False)


def test_spans_of_time() -> None:
    assert [span(seconds) for seconds in (0, 59.6, 3700, 90061)] == ["0:00:00", "0:01:00", "1:01:40", "1-1:01:01"]


def make_job(base: Path) -> JobFolder:
    folder = JobFolder.create(base / "runs", "train")
    folder.job_pickle.write_bytes(b"")
    folder.link_as("12")
    return folder
