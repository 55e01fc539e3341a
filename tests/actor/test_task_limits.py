"""Programs that may start too few processes and threads: each ends with an error that names the limit."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support import DEADLINE, REPOSITORY, wait_until

PROGRAM = """
import sys
import monarch_slurm.actor as public
from monarch_slurm.actor import Actor, endpoint, this_host


class Worker(Actor):
    @endpoint
    def hello(self) -> str:
        return "hello"


def work() -> str:
    procs = this_host().spawn_procs({"n": 6})
    actors = [procs.spawn(f"worker{number}", Worker) for number in range(3)]
    answers = [actor.hello.call() for actor in actors]
    for answer in answers:
        answer.get(100)
    procs.stop().get(100)
    return "done"


if __name__ == "__main__":
    told = []
    public.unhandled_fault_hook = lambda failure: told.append(failure.report())
    try:
        result = work()
    except BaseException as error:
        result = f"{type(error).__name__}: {error}"
    print("RESULT", result, flush=True)
"""

USER = 64_123
"""Nobody has this user id, so that its limits count what the program starts and nothing else."""

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: another user's limits, a control group")


def processes_of_user() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.uids().real == USER and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder that user `USER` may use."""
    folder = Path("/tmp") / f"mt-{os.getpid()}"  # pytest's own folders are closed to other users
    folder.mkdir(mode=0o700)
    os.chown(folder, USER, USER)
    yield folder
    subprocess.run(["rm", "-rf", str(folder)], check=True)


# A user who may read whatever root may: the interpreter can be in root's home.
AS_USER = [
    "setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--inh-caps=-all,+dac_read_search",
    "--ambient-caps=+dac_read_search",
]  # fmt: skip


def run(home: Path, *before: str, limits: dict[int, int]) -> str:
    """Run the program; return what it prints."""
    (home / "program.py").write_text(PROGRAM)
    environment = {
        **os.environ, "PYTHONPATH": str(REPOSITORY), "XDG_RUNTIME_DIR": str(home), "HOME": str(home),
        "TMPDIR": str(home), "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip

    def set_limits() -> None:
        for kind, most in limits.items():
            resource.setrlimit(kind, (most, most))

    with open(home / "output", "wb") as output:
        process = subprocess.Popen(
            [*before, sys.executable, str(home / "program.py")], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            env=environment, cwd=home, start_new_session=True, preexec_fn=set_limits,
        )  # fmt: skip
        try:
            process.wait(2 * DEADLINE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError("it waits forever:\n" + (home / "output").read_text()) from None
    return (home / "output").read_text()


def check(said: str, name: str, most: int) -> None:
    """The program has ended well, or its caller has an error that names the limit."""
    (result,) = [line for line in said.splitlines() if line.startswith("RESULT ")] or [said]
    if result != "RESULT done":
        assert name in result, said
        assert f"{most}" in result, said
    assert "callback of the I/O loop failed" not in said, said


@root_only
@pytest.mark.parametrize("most", [3, 6, 9, 12, 15, 18, 24, 32])
def test_a_limit_of_the_user(home: Path, most: int) -> None:
    check(run(home, *AS_USER, limits={resource.RLIMIT_NPROC: most}), "RLIMIT_NPROC", most)
    wait_until(lambda: not processes_of_user(), "nothing is left of it")


@root_only
@pytest.mark.parametrize(
    ("kind", "most", "name"),
    [
        (resource.RLIMIT_NOFILE, 16, "file descriptors"),
        (resource.RLIMIT_NOFILE, 40, "file descriptors"),
        (resource.RLIMIT_AS, 200 * 2**20, "RLIMIT_AS"),
    ],
)
def test_limits_of_a_process(home: Path, kind: int, most: int, name: str) -> None:
    check(run(home, *AS_USER, limits={kind: most}), name, most)
    wait_until(lambda: not processes_of_user(), "nothing is left of it")


@root_only
@pytest.mark.parametrize("most", [4, 10, 14, 20, 30])
def test_a_limit_of_the_control_group(home: Path, most: int) -> None:
    group = Path("/sys/fs/cgroup/pids") if Path("/sys/fs/cgroup/pids").is_dir() else Path("/sys/fs/cgroup")
    group /= f"monarch-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "pids.max").write_text(str(most))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        said = run(home, "sh", "-c", enter, "sh", limits={})
        check(said, "pids.max", most)
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "nothing is left of it")
    finally:
        group.rmdir()
