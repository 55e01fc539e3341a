"""Two users with jobs on the same node: neither can read what is the other's, nor talk to it."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_nodes import Cluster, read, wait_until
from slurm_programs import SURVIVES

from monarch_slurm.job import Phase, SlurmJob, follow

Program = Callable[[str], list[str]]

OTHER = 33  # www-data
SYSTEM_PYTHON = "/usr/bin/python3"


def pid_in_node(pid: int) -> int:
    """Return the pid that a process has in the namespace of its node."""
    line = next(line for line in read(Path(f"/proc/{pid}/status")).splitlines() if line.startswith("NSpid:"))
    return int(line.split()[-1])


@pytest.mark.skipif(not os.access(SYSTEM_PYTHON, os.X_OK), reason=f"no {SYSTEM_PYTHON}, which any user can run")
def test_another_user_on_the_node_gets_nothing(cluster: Cluster, program: Program, tmp_path: Path) -> None:
    job = SlurmJob({"hosts": 1}, nodelist="n2", exclusive=False, mem="1G")
    job.apply(program(SURVIVES.replace('"hosts": 4', '"hosts": 1')))
    wait_until(lambda: "answering: n2" in read(job.folder / "controller.log"), "the node to answer")
    agent = pid_in_node(max(cluster.agents("n2")))
    # The way to the folder is open to all, so that what protects the folder is its own mode.
    for parent in [job.folder.parent, *job.folder.parents]:
        if str(parent).startswith("/tmp/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    base = Path(os.environ["XDG_RUNTIME_DIR"])
    base.chmod(0o755)
    sockets = next(path.parent for path in base.glob("**/agent.sock"))
    ip, _, port = json.loads(read(job.folder / "controller.json"))["address"].removeprefix("tcp://").rpartition(":")
    intruder = shutil.copy(Path(__file__).with_name("intruder.py"), base / "intruder.py")

    as_other = ["setpriv", f"--reuid={OTHER}", f"--regid={OTHER}", "--clear-groups"]
    srun = ["srun", "--nodelist=n2", "--mem=100M", "--chdir=/", SYSTEM_PYTHON, str(intruder)]
    said = cluster.run(*as_other, *srun, str(job.folder), str(sockets), ip, port, str(agent))
    Path(intruder).unlink()
    found = json.loads(said.splitlines()[-1])

    assert found["uid"] == OTHER
    denied = "PermissionError"
    assert (found["folder"], found["logs"], found["sockets"], found["environ"]) == (denied,) * 4
    assert found["files"] == [denied] * 4
    assert found["socket"] == denied
    assert found["consoles"]
    assert set(found["consoles"].values()) <= {"", "ConnectionResetError", "BrokenPipeError"}, found["consoles"]
    assert found["tcp"] == "closed"
    assert found["kill"] == denied
    assert job.status().phase is Phase.RUNNING
    assert read(job.folder / "controller.log").splitlines()[1:2] == ["answering: n2"]
    Path("stop").touch()
    assert follow(job, io.StringIO()) == 0
