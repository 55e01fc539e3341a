"""A real Slurm cluster of four nodes for the tests in this folder; see tests/slurm_cluster.sh."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slurm_nodes import ROOT, Cluster, wait_until

from monarch_slurm.job.folder import FOLDER_VARIABLE
from monarch_slurm.wire.runtime_dir import sweep_away

NO_SLURM = "MONARCH_SLURM_TEST_NO_SLURM"
COMMANDS = ("slurmctld", "slurmd", "slurmdbd", "mariadbd", "munged", "sbatch", "ip", "nsenter")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def _cluster() -> Iterator[Cluster]:
    if os.environ.get(NO_SLURM) == "1":
        pytest.skip(f"{NO_SLURM}=1")
    missing = [name for name in COMMANDS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    if os.getuid() != 0 or missing:
        reason = f"{', '.join(missing)} missing; run: bash tests/slurm_cluster.sh install" if missing else "not root"
        pytest.fail(f"no Slurm cluster for these tests: {reason} (or set {NO_SLURM}=1 to skip them)", pytrace=False)
    folder = Path(tempfile.mkdtemp(prefix="sl", dir="/tmp"))
    cluster = Cluster(folder)
    try:
        cluster.call("up", str(len(cluster.nodes)))
        yield cluster
    finally:
        cluster.call("down")
        shutil.rmtree(folder)


@pytest.fixture
def cluster(_cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cluster]:
    """The cluster, all idle before and after; nothing of a test may be left on it."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "SBATCH_", "MONARCH_")):
            monkeypatch.delenv(name)
    path = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{path}" if path else str(ROOT))
    monkeypatch.setenv("SLURM_CONF", str(_cluster.folder / "etc" / "slurm.conf"))
    sockets = Path(tempfile.mkdtemp(prefix="ms-test-", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(sockets))
    monkeypatch.chdir(tmp_path)
    wait_until(_cluster.is_idle, "all nodes idle before the test")
    losses = _cluster.losses
    yield _cluster
    for job in _cluster.run("squeue", "-h", "-o", "%i").split():
        subprocess.run(["scancel", job], check=False)
    _cluster.heal()
    try:
        wait_until(_cluster.is_idle, "all nodes idle after the test")
    except AssertionError:
        _cluster.heal(*_cluster.nodes)
        raise
    wait_until(lambda: not any(map(_cluster.processes, _cluster.nodes)), "nothing of ours to be left on the nodes", 10)
    wait_until(lambda: not of_jobs_in(tmp_path), "no process of a job of this test to be left on any machine", 10)
    if _cluster.losses == losses:  # a lost node cannot clean up
        for folder in sockets.iterdir():
            sweep_away(folder)  # as the next start does: Slurm kills here what has not ended after 10 s (KillWait)
        wait_until(lambda: not any(sockets.iterdir()), "no folder of sockets to be left", 10)
    shutil.rmtree(sockets)


def of_jobs_in(folder: Path) -> list[str]:
    """Return the processes, on any node or on this machine, whose environment names a job's folder in ``folder``."""
    wanted = f"{FOLDER_VARIABLE}={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if wanted in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue  # it ended meanwhile
    return found


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], list[str]]:
    """Return a function that writes a Python program and returns its command line."""

    def write(text: str) -> list[str]:
        path = tmp_path / "program.py"
        path.write_text(text)
        return [sys.executable, str(path)]

    return write
