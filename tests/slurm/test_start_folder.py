"""A job that is submitted from a folder in which others may have put modules."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from planted_modules import imported, plant
from slurm_nodes import Cluster

from monarch_slurm.job import SlurmJob, follow

Program = Callable[[str], list[str]]

ASKS = """
import os
from monarch_slurm.actor import Actor, endpoint
from monarch_slurm.job import SlurmJob

class Where(Actor):
    @endpoint
    def modules(self):
        import beside
        return beside.__file__, os.getcwd(), os.environ["PYTHONPATH"]

hosts = SlurmJob({"hosts": 2}).state().hosts
print(hosts.spawn_procs().spawn("where", Where).modules.call().get(60).values(), flush=True)
"""


def test_nothing_of_the_folder_is_imported(
    cluster: Cluster, program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the batch script, the nodes' tasks, agents and zygotes, though PYTHONPATH has an entry for it, too. The module
    beside the program is found on all nodes."""
    command = program(ASKS)
    (tmp_path / "beside.py").touch()
    folder, mark = tmp_path / "shared", tmp_path / "mark"
    folder.mkdir()
    plant(folder, mark)
    monkeypatch.chdir(folder)
    path = f"relative:{os.environ['PYTHONPATH']}"
    monkeypatch.setenv("PYTHONPATH", path)
    job = SlurmJob({"hosts": 2}, log_dir=str(tmp_path / "runs"))
    job.apply(command)
    out = io.StringIO()
    assert follow(job, out) == 0, out.getvalue()
    assert imported(mark) == []
    assert eval(out.getvalue().splitlines()[-1]) == [(f"{tmp_path}/beside.py", str(folder), path)] * 2
