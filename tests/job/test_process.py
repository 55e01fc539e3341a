from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from job_agents import Worker
from support import wait_gone

from monarch_slurm.job import JobSpecError, LostHostsError, ProcessJob
from monarch_slurm.job.processes import find_processes

DEADLINE = 60.0

PROGRAM = """
import faulthandler, os, sys
faulthandler.dump_traceback_later(45, exit=True)  # in place of hanging
from monarch_slurm.actor import Actor, endpoint
from monarch_slurm.job import ProcessJob

class Here(Actor):
    @endpoint
    def where(self):
        return os.environ["MARK"], os.getsid(0)

job = ProcessJob({"trainers": 2, "spare": 1}, env={"MARK": "x"})
state = job.state(cached_path=None)
print("folder", job._folder.path, flush=True)
assert len(state.trainers) == 2 and len(state.spare) == 1
procs = state.trainers.spawn_procs({"gpus": 2})
here = procs.spawn("here", Here)
answers = list(here.where.call().get().values())
assert [mark for mark, _ in answers] == ["x"] * 4, answers
if sys.argv[1] == "kill":
    job.kill()
    assert not job.active
elif sys.argv[1] == "crash":
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def private_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A short folder for temporary files, in which nothing may be left."""
    folder = Path(tempfile.mkdtemp(prefix="ms-test-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield
    left = sorted(folder.iterdir())
    shutil.rmtree(folder)
    assert not left


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE:g} s in vain for: {what}"
        time.sleep(0.02)


def run(how: str, tmp_path: Path) -> tuple[int, Path]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, str(program), how], capture_output=True, text=True, timeout=DEADLINE)
    folder = next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("folder"))
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, Path(folder)


@pytest.mark.usefixtures("private_tmp")
@pytest.mark.parametrize("how", ["kill", "leave"])
def test_hosts_are_processes_and_are_gone_after_the_program(how: str, tmp_path: Path) -> None:
    code, folder = run(how, tmp_path)
    assert code == 0
    assert not folder.exists()
    assert find_processes(folder) == set()


def test_hosts_end_when_the_program_is_killed_without_waiting_for_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONARCH_SLURM_MESH_ORPHAN_TIMEOUT", "600")
    code, folder = run("crash", tmp_path)
    assert code == -9
    wait_until(lambda: not find_processes(folder), "end of the hosts")
    shutil.rmtree(folder)


def test_a_dumped_job_is_taken_over_by_another_program(tmp_path: Path) -> None:
    job = ProcessJob({"hosts": 1})
    job.apply()
    job.dump("job.pkl")
    assert job._folder is not None
    folder = job._folder.path
    program = (
        "from monarch_slurm.job import ProcessJob\n"
        "job = ProcessJob({'hosts': 1})\n"
        "assert len(job.state('job.pkl').hosts) == 1\n"
        "job.kill()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=DEADLINE)
    assert find_processes(folder) == set()
    assert not job.can_run(ProcessJob({"hosts": 1}))
    with pytest.raises(LostHostsError, match="lost connection to worker processes: hosts-0"):
        job.state(None)
    job.kill()


def test_a_job_stands_in_only_for_one_that_asks_for_the_same() -> None:
    job = ProcessJob({"hosts": 1})
    job.apply()
    try:
        assert job.can_run(ProcessJob({"hosts": 1}))
        assert not job.can_run(ProcessJob({"hosts": 2}))
        assert not job.can_run(ProcessJob({"hosts": 1}, env={"A": "1"}))
    finally:
        job.kill()
    assert not job.can_run(ProcessJob({"hosts": 1}))


def test_a_client_script_is_refused() -> None:
    with pytest.raises(RuntimeError, match="client script"):
        ProcessJob({"hosts": 1}).apply("train.py")
    with pytest.raises(JobSpecError):
        ProcessJob({})


def test_two_states_of_a_job_are_stopped_one_by_one() -> None:
    job = ProcessJob({"hosts": 2})
    try:
        first, second = job.state(None).hosts, job.state(None).hosts
        assert first == second
        mine: Any = first.slice(hosts=0).spawn_procs().spawn("actor", Worker)
        others: Any = second.spawn_procs().spawn("actor", Worker)
        pid, pids = mine.pid.call_one().get(DEADLINE), others.pid.call().get(DEADLINE).values()
        first.stop().get(DEADLINE)
        wait_gone(pid)
        assert others.pid.call().get(DEADLINE).values() == pids
        again: Any = first.spawn_procs().spawn("actor", Worker)
        assert len(again.pid.call().get(DEADLINE)) == 2
        second.shutdown().get(DEADLINE)
        for mesh in (first, second, first.slice(hosts=0), job.state(None).hosts):
            with pytest.raises(RuntimeError, match="HostMesh has already been shut down"):
                mesh.spawn_procs()
        for mesh in (first, second):
            for end in (mesh.shutdown, mesh.stop):
                with pytest.raises(RuntimeError, match="HostMesh has already been shut down"):
                    end()
    finally:
        job.kill()


def test_a_block_ends_its_hosts_once() -> None:
    job = ProcessJob({"hosts": 1})
    try:
        with job.state(None).hosts as hosts:
            hosts.shutdown().get(DEADLINE)
    finally:
        job.kill()
