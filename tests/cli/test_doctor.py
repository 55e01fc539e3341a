"""``monarch-slurm doctor`` on this machine: text, JSON, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from monarch_slurm.cli.doctor import doctor
from monarch_slurm.health import LEVELS


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)


def test_every_check_has_a_line_and_every_feature_a_reason() -> None:
    done = CliRunner().invoke(doctor, ["--no-gpus"])
    assert done.exit_code in (0, 3), done.output
    for words in ("GPUs: ", "locked memory: ", "shared memory: ", "what works here:", "yes   actors: "):
        assert words in done.output


def test_json_has_findings_features_and_facts() -> None:
    done = CliRunner().invoke(doctor, ["--json", "--no-gpus"])
    told = json.loads(done.output)
    assert {finding["level"] for finding in told["findings"]} <= set(LEVELS)
    assert {feature["name"] for feature in told["features"]} >= {"actors", "training", "GPU-direct RDMA"}
    (facts,) = told["facts"].values()
    assert facts["cpus"] >= 1


def test_what_must_be_mended_shows_in_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    done = CliRunner().invoke(doctor, ["--no-gpus"])
    assert done.exit_code == 3
    assert "BAD   temporary files: not there\n      remove old files, or set TMPDIR" in done.output


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--nodes", ""], 2, "no node is named"),
        (["--nodes", "n[2-1"], 2, "n[2-1"),
        (["--nodes", "all"], 2, "not in a job of Slurm"),
        (["--timeout", "0"], 2, "0.0 is not in the range"),
    ],
)
def test_wrong_arguments_are_told(arguments: list[str], code: int, text: str) -> None:
    done = CliRunner().invoke(doctor, arguments)
    assert (done.exit_code, text in done.output) == (code, True), done.output
