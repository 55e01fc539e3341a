"""Bad input to ``monarch-slurm train``: an error to act on, the right exit code, no traceback, nothing left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support import run_command

from monarch_slurm import config


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["train"], 2, "--local"),
        (["train", "--local", "--nodes", "2"], 2, "exclude"),
        (["train", "--local", "--replicas", "1"], 2, "x>=2"),
        (["train", "--local", "--replicas", "2", "--min-replicas", "3"], 2, "--min-replicas 3"),
        (["train", "--local", "--fail-every", "0"], 2, "positive"),
        (["train", "--local", "--replicas", "2", "--fail-every", "9"], 2, "take --replicas 3"),
        (["train", "--local", "--fail-every", "nan"], 2, "positive"),
        (["train", "--local", "--failures", "kill,explode"], 2, "explode"),
        (["train", "--local", "--model", "huge"], 2, "tiny"),
        (["train", "--local", "--data", "/no/such/text"], 2, "/no/such/text"),
        (["train", "--local", "--reference", "/no/such/report.json"], 2, "/no/such/report.json"),
        (["train", "--local", "--out", "/proc/runs"], 1, "/proc/runs"),
        (["train", "--local", "--tokens", "many"], 2, "many"),
        (["train", "--locale"], 2, "--local"),
        (["train", "--local", "fast"], 2, "unexpected: fast; options after -- are for --engine torchtitan"),
        (["train", "--local", "--", "--training.steps", "3"], 2, "options after -- are for --engine torchtitan"),
        (["train", "--local", "--engine", "torchtitan", "--lr", "1"], 2, "for the built-in engine only: --lr"),
        (["train", "--engine", "torchtitan", "--", "--module", "llama3"], 2, "--local"),
        (["train", "--local", "--replica-backend", "ccl"], 2, "this machine has none"),
        (["tarin"], 2, "tarin"),
    ],
)
def test_bad_input_is_told_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    got, output = run_command(monkeypatch, capsys, *arguments)
    assert got == code, output
    assert words in output
    assert "Traceback" not in output
    assert os.listdir(tmp_path) == []


def test_no_slurm_on_the_path(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    code, output = run_command(monkeypatch, capsys, "train", "--nodes", "2")
    assert code == 1
    assert "sbatch" in output
    assert "Traceback" not in output


def test_help_and_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run_command(monkeypatch, capsys, "train", "--help")
    assert code == 0
    assert "--fail-every" in output
    code, output = run_command(monkeypatch, capsys, "--version")
    assert code == 0
    assert "monarch-slurm" in output


def test_a_folder_for_sockets_that_cannot_be_used_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with config.configured(runtime_dir="/proc"):
        code, output = run_command(monkeypatch, capsys, "train", "--local", "--model", "tiny")
    assert code == 1
    assert output.splitlines() == [output.strip()]
    assert output.startswith("error: cannot make a folder for sockets in /proc")
    assert os.listdir(tmp_path) == []
