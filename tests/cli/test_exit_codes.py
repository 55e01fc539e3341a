"""Exit codes of all commands: 2 for what is wrong with the command line, 1 for what has failed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from support import run_command

from monarch_slurm.cli import exit_codes
from monarch_slurm.cli.main import cli

WRONG, FAILED = exit_codes.WRONG_USE, exit_codes.FAILED
SUBMIT = ["submit", "--nodes", "1"]

CASES: list[tuple[list[str], int, str]] = [
    (["tarin"], WRONG, "tarin"),
    (["apply"], FAILED, "has no job yet: `monarch-slurm apply MODULE.JOB`"),
    (["apply", "nodot"], WRONG, "module.attribute expected"),
    (["apply", "no_such.job"], WRONG, "No module named"),
    (["apply", "jobs.other"], WRONG, "no attribute 'other'"),
    (["apply", "jobs.number"], WRONG, "is no job but a int"),
    (["attach"], WRONG, "Missing argument"),
    (["attach", "x"], WRONG, "neither a number of Slurm's nor the folder of a job"),
    (["attach", "12"], FAILED, "no Slurm here"),
    (["build-native", "--platform", "abacus"], WRONG, "abacus"),
    (["cancel", "x"], WRONG, "neither a number of Slurm's nor the folder of a job"),
    (["cancel", "12"], FAILED, "no Slurm here"),
    (["cancel", "12", "x"], WRONG, "no Slurm here"),
    (["context", "create", "../x", "jobs.one"], WRONG, "letters, digits"),
    (["context", "ls", "x"], WRONG, "unexpected extra argument"),
    (["context", "rm", "x"], WRONG, "no context 'x'"),
    (["context", "use", "x"], WRONG, "no context 'x'"),
    (["debug", "--pid", "0"], WRONG, "x>=1"),
    (["debug", "--pid", "999999999"], FAILED, "no program of yours with pid 999999999"),
    (["doctor", "--nodes", "n[2-1"], WRONG, "a range that runs backwards"),
    (["doctor", "--nodes", "n1"], FAILED, "srun is not on the PATH"),
    (["exec", "true"], FAILED, "has no job yet: `monarch-slurm apply MODULE.JOB`"),
    (["exec"], WRONG, "a command, --script or -m expected"),
    (["exec", "--script", "no.sh"], WRONG, "--script no.sh: No such file"),
    (["kill"], FAILED, "no job is remembered"),
    (["kill", "../x"], WRONG, "letters, digits"),
    (["logs", "x"], WRONG, "neither a number of Slurm's nor the folder of a job"),
    (["logs", "12", "-n", "-1"], WRONG, "x>=0"),
    (["logs", "12"], FAILED, "no Slurm here"),
    (["logs", "."], WRONG, "is not the folder of a job"),
    (["shell", "--job", "0"], WRONG, "'0': a job's number in Slurm expected"),
    (
        ["shell"],
        FAILED,
        "monarch-slurm shell), or name one of your running jobs with --job ID",
    ),
    (["stacks", "--pid", "x"], WRONG, "valid integer"),
    (["stacks", "--pid", "999999999"], FAILED, "no program of yours with pid 999999999"),
    (["status", "a_run"], WRONG, "is the folder of a run, not of a job of Slurm: journal.jsonl"),
    (["status"], FAILED, "no Slurm here"),
    ([*SUBMIT, "true"], FAILED, "no Slurm here"),
    ([*SUBMIT, "--mesh", "a=1", "true"], WRONG, "--nodes and --mesh exclude each other: --nodes N is --mesh hosts=N"),
    (["submit", "true"], WRONG, "say how many nodes"),
    ([*SUBMIT, "--time", "soon", "true"], WRONG, "time limit 'soon'"),
    ([*SUBMIT, "--container", "rocm", "true"], WRONG, "say its runtime"),
    ([*SUBMIT, "--slurm-arg", "x", "true"], WRONG, "an option starts with '-'"),
    ([*SUBMIT, "--log-dir", "a%b", "--dry-run", "true"], FAILED, "no Slurm here"),
    (["template", "list", "x"], WRONG, "unexpected extra argument"),
    (["template", "show", "x"], WRONG, "no template 'x'; there are: "),
    (["template", "render", "nodes=3"], WRONG, "where the name of a template is expected, such as: render cpu nodes=3"),
    (["template", "render", "cpu", "nodes"], WRONG, "FIELD=VALUE expected"),
    (["template", "render", "cpu", "nodes=1", "nodes=2"], WRONG, "nodes is given twice"),
    (["template", "render", "cpu", "nods=1"], WRONG, "no 'nods'; it has: "),
    (["template", "render", "cpu", "nodes=-3"], WRONG, "nodes=-3: a whole number, 1 or more, expected"),
    (["template", "render", "cpu", "nodes=0"], WRONG, "nodes=0: a whole number, 1 or more, expected"),
    (["template", "render", "cpu", "-o", "no/such"], FAILED, "cannot write no/such"),
    (["template", "render", "cpu", "-o", "jobs.py"], FAILED, "is there already"),
    (["train", "--local", "--replicas", "2", "--min-replicas", "3"], WRONG, "--min-replicas 3"),
    (["train", "--local", "--data", "no.txt"], WRONG, "no.txt does not exist"),
    (["train", "--local", "--data", "empty.txt"], WRONG, "is empty"),
    (["train", "--local", "--reference", "no.json"], WRONG, "--reference no.json: no report at"),
    (["train", "--local", "--resume", "."], WRONG, "is not the folder of a run"),
    (["train", "--local", "--out", "/proc/runs"], FAILED, "/proc/runs"),
    (["train", "--nodes", "1"], FAILED, "no Slurm here"),
]

FILES: list[tuple[list[str], str]] = [
    (["no.py"], "program no.py is not there in "),
    (["python3", "no.py"], "program no.py is not there in "),
    (["./no.sh", "-x"], "program ./no.sh is not there in "),
    (["/no/such/train.py"], "program /no/such/train.py is not there; all nodes must see it"),
    (["--venv", "no", "true"], "virtual environment no is not there in "),
    (["--venv", "a_run", "true"], "virtual environment a_run is a folder without bin/activate; all nodes must see it"),
    (["python3", "a_run"], "program a_run is a folder without __main__.py; all nodes must see it"),
    (["./a_run"], "program ./a_run is a folder; Python runs one: python ./a_run"),
    (["--container", "no.sif", "true"], "container image no.sif is not there in "),
    (["--container", "/no/such.sqsh", "true"], "container image /no/such.sqsh is not there; "),
]
"""Files that `submit` looks for, and what it says."""

ELSEWHERE = [
    ["/opt/rocm/bin/on_the_nodes"],
    ["--container", "here.sif", "inside.py"],
    ["--setup", "git clone here", "made/by/setup.py"],
    ["--setup", "make venv", "--venv", "venv", "jobs.py"],
    ["--venv", "a_venv", "jobs.py"],
    ["python3", "-c", "print('a.py')"],
]
"""What may be on the nodes although it is not here, and what is here."""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in list(os.environ):
        if name.startswith(("SLURM", "SBATCH")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.py").write_text("number = 3\n")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "here.sif").touch()
    (tmp_path / "a_run").mkdir()
    (tmp_path / "a_run" / "journal.jsonl").touch()
    (tmp_path / "a_venv" / "bin").mkdir(parents=True)
    (tmp_path / "a_venv" / "bin" / "activate").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "code", "words"), CASES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_code_and_words(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    before = sorted(os.listdir(folder))
    got, said = run_command(monkeypatch, capsys, *arguments)
    assert (got, words in " ".join(said.split())) == (code, True), said
    assert "Traceback" not in said
    assert sorted(name for name in os.listdir(folder) if name != "__pycache__") == before


def commands(group: click.Group = cli, *before: str) -> Iterator[list[str]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, *before, name)
        else:
            yield [*before, name]


@pytest.mark.parametrize("command", list(commands()), ids=" ".join)
def test_every_command_has_a_wrong_use_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert any(arguments[: len(command)] == command and code == WRONG for arguments, code, _ in CASES)
    if command != ["exec"]:  # what it does not know is of the command that it runs
        assert run_command(monkeypatch, capsys, *command, "--no-such-option")[0] == WRONG


def test_the_help_lists_all_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run_command(monkeypatch, capsys, "--help")
    assert code == 0
    for number in (0, WRONG, FAILED, exit_codes.UNFIT, 75, exit_codes.INTERRUPTED):
        assert f"\n  {number:5}  " in said


@pytest.mark.parametrize(
    ("arguments", "words"), FILES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_files_that_are_not_there_are_told_before_anything_is_submitted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, said = run_command(monkeypatch, capsys, *SUBMIT, *arguments)
    assert (code, said.startswith(f"error: {words}"), said.count("\n")) == (WRONG, True, 1), said


@pytest.mark.parametrize("arguments", ELSEWHERE, ids=" ".join)
def test_what_may_be_on_the_nodes_is_left_to_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code, said = run_command(monkeypatch, capsys, *SUBMIT, *arguments)
    assert (code, "no Slurm here" in said) == (FAILED, True), said
