"""Commands that submit jobs have the same options of Slurm, each with the same meaning."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from support import run_command

from monarch_slurm.cli.shell import shell
from monarch_slurm.cli.slurm_options import names_of_job_options
from monarch_slurm.cli.submit import submit
from monarch_slurm.cli.train import train
from monarch_slurm.interpreter import module_line

FakeSlurm = Callable[..., Path]
OWN_DEFAULTS = {"job_name", "follow"}


def options_of(command: click.Command) -> dict[str, dict[str, object]]:
    found = {}
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.name is not None:
            told = parameter.to_info_dict()
            found[parameter.name] = {key: told[key] for key in ("opts", "secondary_opts", "type", "help", "default")}
    return found


def test_train_and_submit_have_every_option_of_a_job() -> None:
    training, submitting = options_of(train), options_of(submit)
    names = names_of_job_options()
    assert names <= training.keys()
    assert names <= submitting.keys()
    for name in names - OWN_DEFAULTS:
        assert training[name] == submitting[name], name


def test_what_both_have_beside_them_is_not_of_slurm() -> None:
    both = options_of(train).keys() & options_of(submit).keys() - names_of_job_options()
    assert both == {"nodes"}


def test_the_options_of_a_prompt_are_those_of_a_job() -> None:
    prompt, job = options_of(shell), options_of(submit)
    assert {name for name in prompt if name not in job} == {"job", "take_over", "plain"}
    for name in prompt.keys() & job.keys() - {"log_dir"}:
        assert prompt[name] == job[name], name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--local", "--nodelist", "n1"], "for Slurm only, not for --local: --nodelist"),
        (["--local", "--time", "5", "--json"], "for Slurm only, not for --local: --json, --time"),
        (["--nodes", "1", "--container-mount", "/x"], "--container-mount needs --container IMAGE"),
        (["--nodes", "1", "--container", "image"], "say its runtime"),
        (["--nodes", "1", "--container", "x.sif"], "container image x.sif is not there"),
        (["--nodes", "1", "--venv", "nowhere"], "virtual environment nowhere is not there"),
        (["--nodes", "1", "--follow", "--dry-run"], "--follow excludes"),
        (["--nodes", "1", "--env", "X"], "NAME=VALUE expected"),
    ],
)
def test_bad_options_of_a_job_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = run_command(monkeypatch, capsys, "train", *arguments)
    assert (code, words in said) == (2, True), said
    assert "Traceback" not in said


def test_a_dry_run_of_training_shows_what_runs_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    monkeypatch.chdir(tmp_path)
    fake_slurm()
    options = ["--nodes", "2", "-w", "n[3-4]", "--model", "tiny", "--lr", "0.5", "--out", "here", "--dry-run"]
    code, said = run_command(monkeypatch, capsys, "train", *options)
    assert code == 0, said
    assert "#SBATCH --nodelist='n[3-4]'\n" in said
    command = (
        f"{module_line(sys.executable, 'monarch_slurm')} train --in-job --model=tiny --lr=0.5 --out={tmp_path}/here"
    )
    assert f"# on the head node: {command}\n" in said
    assert not Path("here").exists()


@pytest.mark.parametrize(
    ("more", "outside", "inside"),
    [
        ([], sys.executable, "python3"),
        (["--python", "/opt/conda/bin/python"], sys.executable, "/opt/conda/bin/python"),
        (["--python", "micromamba run python", "--conda", "base"], "python", "micromamba run python"),
    ],
)
@pytest.mark.parametrize("command", [["submit", "train.py"], ["train", "--model", "tiny"]], ids=lambda words: words[0])
def test_python_is_that_of_the_container(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    fake_slurm: FakeSlurm,
    command: list[str],
    more: list[str],
    outside: str,
    inside: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    fake_slurm()
    Path("x.sif").touch()
    options = ["--nodes", "1", "--container", "x.sif", "--container-arg=--rocm", *more, "--dry-run"]
    code, said = run_command(monkeypatch, capsys, command[0], *options, *command[1:])
    assert code == 0, said
    assert f"exec {module_line(f'{outside} -u', 'monarch_slurm.job.submitted')} " in said
    program, host = re.findall(r"^# (?:on|for) .*?: (.*)$", said, re.MULTILINE)
    for line in (program, host):
        assert re.search(rf"apptainer exec (--bind=\S+ )*--rocm x\.sif {re.escape(inside)} ", line), line
    ours = module_line(inside, "monarch_slurm")
    assert f"{ours} train --in-job " in program or program.endswith(f"{inside} train.py")


def test_a_run_in_a_container_has_its_paths_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    monkeypatch.chdir(tmp_path)
    fake_slurm()
    Path("text").write_text("some text\n" * 10000)
    options = ["--container", "rocm/pytorch", "--container-runtime", "pyxis", "--container-mount", "/scratch:/s"]
    code, said = run_command(
        monkeypatch, capsys, "train", "--nodes", "1", *options, "--data", "text", "--out", "here", "--dry-run"
    )
    assert code == 0, said
    folder = f"{tmp_path}/here/JOB_FOLDER"
    mounts = f"{folder}:{folder},/scratch:/s,{tmp_path}/here:{tmp_path}/here,{tmp_path}/text:{tmp_path}/text"
    assert said.count(f"--container-mounts={mounts} ") == 2, said
    assert f"--data={tmp_path}/text --out={tmp_path}/here" in said


def test_json_names_job_and_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    monkeypatch.chdir(tmp_path)
    fake_slurm(
        sinfo="case $* in *%m*) echo 'debug*|64000';; *) echo 'debug*|4';; esac", sbatch="echo Submitted batch job 12"
    )
    code, said = run_command(monkeypatch, capsys, "train", "--nodes", "1", "--model", "tiny", "--json")
    assert code == 0, said
    told = json.loads(said)
    assert (told["job_id"], Path(told["folder"]).parent) == (12, tmp_path / "runs")
    assert "#SBATCH --job-name=monarch-train\n" in Path(told["folder"], "submission.sh").read_text()


def test_the_engines_options_are_at_the_end_of_the_jobs_command() -> None:
    from monarch_slurm.cli.train import _words_in_job

    words = [
        "--nodes",
        "2",
        "-p",
        "gpu",
        "--engine",
        "torchtitan",
        "--force",
        "--out",
        "/runs",
        "--",
        "--module",
        "llama3",
    ]
    context = train.make_context("train", words)
    assert _words_in_job(context, {"engine", "force"}) == [
        "train", "--in-job", "--engine=torchtitan", "--out=/runs", "--force", "--", "--module", "llama3",
    ]  # fmt: skip
