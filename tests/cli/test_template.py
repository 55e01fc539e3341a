from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from monarch_slurm.cli.template import template
from monarch_slurm.job.templates import find_template


def run(*arguments: str) -> Result:
    return CliRunner().invoke(template, arguments)


def test_list_and_show() -> None:
    assert "cpu          Nodes without GPUs.\n" in run("list").output
    told = {item["name"]: item for item in json.loads(run("list", "--json").output)}
    assert told["cpu"]["fields"]["nodes"] == "2"
    assert told["cpu"]["fields"]["partition"] == ""
    assert run("show", "cpu").output == find_template("cpu").text


def test_render_writes_a_file_and_not_over_another(tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    assert run("render", "cpu", "nodes=3", "-o", str(path)).exit_code == 0
    assert "#SBATCH --nodes=3\n" in path.read_text()
    again = run("render", "cpu", "-o", str(path))
    assert (again.exit_code, "is there already" in str(again.exception)) == (1, True)
    assert run("render", "cpu", "-o", str(path), "--force").exit_code == 0
    assert path.read_text() == run("render", "cpu").output == find_template("cpu").text
