"""Spares of a ProcessJob, in programs of their own; calls go down a tree of hosts there."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from monarch_slurm.job import JobSpecError, ProcessJob

PROGRAM = """
import faulthandler, os, signal, sys
faulthandler.dump_traceback_later(80, exit=True)  # in place of hanging
import psutil
from monarch_slurm.actor import Actor, RestartPolicy, SupervisionError, endpoint
from monarch_slurm.job import ProcessJob

class Counter(Actor):
    def __init__(self):
        self.value = 0

    @endpoint
    def add(self):
        self.value += 1
        return self.value

    @endpoint
    def agent(self):
        return os.getppid()

job = ProcessJob({"hosts": 6}, spares=1, on_lost=sys.argv[1])
hosts = job.state(cached_path=None).hosts
counters = hosts.spawn_procs(restart=RestartPolicy(max_restarts=100)).spawn("counter", Counter)
assert list(counters.add.call().get().values()) == [1] * 6

def lose(rank):
    values = None
    os.kill(counters.slice(hosts=rank).agent.call_one().get(), signal.SIGKILL)
    while values is None or values[rank] >= min(values[:rank] + values[rank + 1:]):
        try:
            values = list(counters.add.call().get().values())
        except SupervisionError:
            pass
    print(*hosts.host_names, flush=True)

lose(5)
if sys.argv[1] == "request":
    lose(1)
before = list(counters.add.call().get().values())
for round in range(100):
    counters.add.broadcast()
assert list(counters.add.call().get().values()) == [value + 101 for value in before]
job.kill()
"""


@pytest.mark.parametrize(
    ("on_lost", "names"),
    [
        ("shrink", ["hosts-0 hosts-1 hosts-2 hosts-3 hosts-4 spare.0"]),
        (
            "request",
            ["hosts-0 hosts-1 hosts-2 hosts-3 hosts-4 spare.0", "hosts-0 spare.1 hosts-2 hosts-3 hosts-4 spare.0"],
        ),
    ],
)
def test_a_spare_process_or_a_new_one_takes_the_place(tmp_path: Path, on_lost: str, names: list[str]) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    with tempfile.TemporaryDirectory(prefix="ms-test-", dir="/tmp") as sockets:
        done = subprocess.run(
            [sys.executable, str(tmp_path / "program.py"), on_lost],
            env={**os.environ, "MONARCH_SLURM_MAX_CAST_FANOUT": "2", "XDG_RUNTIME_DIR": sockets, "TMPDIR": sockets},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == names
        assert not list(Path(sockets).iterdir())


def test_what_makes_no_sense() -> None:
    with pytest.raises(JobSpecError, match="spares is -1"):
        ProcessJob({"hosts": 1}, spares=-1)
    with pytest.raises(JobSpecError, match="one of shrink, request, fail"):
        ProcessJob({"hosts": 1}, on_lost="pray")  # type: ignore[arg-type]
