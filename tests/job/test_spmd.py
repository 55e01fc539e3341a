"""Jobs of programs for torchrun: workers that their ranks start, and torchrun commands as jobs."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from support import DEADLINE, REPOSITORY, descendants, wait_gone

from monarch_slurm.actor import NoKeyError
from monarch_slurm.job.errors import JobSpecError
from monarch_slurm.job.spmd import StoreJob, serve
from monarch_slurm.job.store_workers import workers_from_store

RANK = """
import os, sys, time
from pathlib import Path
from monarch_slurm._src.spmd.host_mesh import host_mesh_from_store
from monarch_slurm.actor import Actor, current_rank, endpoint
from monarch_slurm.job.spmd import StoreJob

class Here(Actor):
    @endpoint
    def where(self):
        return current_rank().rank, os.environ["MARK"], os.environ.get("RANK")

class FolderStore:  # in place of torch's, which each rank would take long to import
    def path(self, key):
        return Path(os.environ["STORE"], key.replace("/", "-"))
    def set(self, key, value):
        aside = self.path(key + ".new")
        aside.write_bytes(value.encode() if isinstance(value, str) else value)
        aside.rename(self.path(key))
    def get(self, key):
        while not self.path(key).exists():
            time.sleep(0.01)
        return self.path(key).read_bytes()

store = FolderStore()
if sys.argv[1] == "job":
    job = StoreJob.from_store(store, name="trainers")
    hosts = None if job is None else job.state().trainers
else:
    hosts = host_mesh_from_store(store)
assert (hosts is None) == (os.environ["RANK"] != "0")
if hosts is not None:
    procs = hosts.spawn_procs({"gpus": 2})
    print(str(procs.extent), sorted(procs.spawn("here", Here).where.call().get(60).values()), flush=True)
    store.set("done", "1")
store.get("done")
print("through", flush=True)
if sys.argv[1] == "job":
    sys.stdin.read()
"""


class Ranks:
    """Two nodes of two ranks each, on this machine."""

    def __init__(self, folder: Path, how: str) -> None:
        (folder / "rank.py").write_text(RANK)
        (folder / "store").mkdir()
        self.processes = []
        for rank in range(4):
            env = {"RANK": rank, "LOCAL_RANK": rank % 2, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}
            mark = {"MARK": f"node {rank // 2}", "STORE": str(folder / "store"), "TMPDIR": str(folder)}
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, str(folder / "rank.py"), how],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                    env={**os.environ, "PYTHONPATH": str(REPOSITORY), **mark,
                         **{name: str(value) for name, value in env.items()}},
                )
            )  # fmt: skip

    def line(self, rank: int) -> str:
        stdout = self.processes[rank].stdout
        assert stdout is not None
        return stdout.readline().strip()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def ranks(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    started = Ranks(tmp_path, request.param)
    yield started
    started.close()


ANSWERS = [(0, "node 0", None), (1, "node 0", None), (2, "node 1", None), (3, "node 1", None)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["job"], indirect=True)
def test_ranks_of_torchrun_start_workers_that_end_with_them(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.line(0) == f"{{hosts: 2, gpus: 2}} {ANSWERS}"
    assert [ranks.line(rank) for rank in range(4)] == ["through"] * 4
    (key,) = tmp_path.glob("msworkers-*/*.key")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    of_node_1 = descendants(ranks.processes[2].pid)
    assert any("store_worker" in " ".join(psutil.Process(pid).cmdline()) for pid in of_node_1)
    assert not descendants(ranks.processes[1].pid)
    family = [pid for process in ranks.processes for pid in descendants(process.pid)]
    ranks.processes[2].kill()
    wait_gone(*of_node_1)
    ranks.close()
    wait_gone(*family)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["mesh"], indirect=True)
def test_hosts_from_a_store(ranks: Ranks) -> None:
    assert ranks.line(0) == f"{{hosts: 2, gpus: 2}} {ANSWERS}"
    assert [process.wait(DEADLINE) for process in ranks.processes] == [0] * 4


class Store(dict[str, bytes]):
    """A store of one process."""

    def set(self, key: str, value: str | bytes) -> None:
        self[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]


ALONE = {"rank": 0, "local_rank": 0, "world_size": 1, "local_world_size": 1}


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"rank": None}, RuntimeError, "RANK is not in the environment"),
        ({"world_size": 3, "local_world_size": 2}, ValueError, "must be divisible"),
        ({"local_world_size": 0}, ValueError, "must be divisible"),
        ({"transport": "metatls"}, ValueError, "unsupported transport 'metatls'"),
        ({"transport": "tcp"}, ValueError, "monarch_port 0"),
        ({"transport": "tcp", "monarch_port": 2**16}, ValueError, "monarch_port 65536"),
        ({"transport": "tcp", "monarch_port": 4444}, NoKeyError, "MONARCH_SLURM_WORKER_KEY"),
    ],
)
def test_what_ranks_cannot_ask_for(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    for variable in ("RANK", "MONARCH_SLURM_WORKER_KEY", "MONARCH_SLURM_JOB_FOLDER"):
        monkeypatch.delenv(variable, raising=False)
    store = Store()
    with pytest.raises(error, match=text):
        StoreJob.from_store(store, **{**ALONE, **options})
    assert not store


def test_a_worker_that_cannot_listen_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MONARCH_SLURM_JOB_FOLDER", str(tmp_path))
    monkeypatch.setattr(socket, "getfqdn", lambda: "127.0.0.1")
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(JobSpecError, match="could not listen at tcp://"),
    ):
        workers_from_store(Store(), transport="tcp", monarch_port=taken.getsockname()[1], **ALONE)
    (key,) = tmp_path.glob("*.key")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_a_torchrun_command_is_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(
        "import os, sys\nopen(os.environ['RANK'] + sys.argv[1], 'w').write(os.environ['WORLD_SIZE'])"
    )
    job = serve(["torchrun", "--nproc-per-node=2", "--standalone", "program.py", "x"], scheduler="local_cwd")
    try:
        assert job.active
        job.run_spmd()
        assert {path.name: path.read_text() for path in tmp_path.glob("?x")} == {"0x": "2", "1x": "2"}
    finally:
        job.kill()
    role = SimpleNamespace(entrypoint="torchrun", args=["program.py", "y"], num_replicas=2)
    served = serve(SimpleNamespace(roles=[role]), scheduler="local_cwd")
    try:
        served.run_spmd()
        assert {path.name: path.read_text() for path in tmp_path.glob("?y")} == {"0y": "2", "1y": "2"}
    finally:
        served.kill()


@pytest.mark.parametrize(
    ("command", "options", "error", "text"),
    [
        ([], {}, ValueError, "command cannot be empty"),
        (["torchrun", "--nnodes=2", "x.py"], {}, ValueError, "--nnodes=2"),
        (["torchrun", "--nnodes", "1:2", "x.py"], {}, ValueError, "--nnodes=1:2"),
        (["torchrun", "--nproc-per-node=2"], {}, ValueError, "no program"),
        (["torchrun", "x.py"], {}, NotImplementedError, "scheduler 'mast_conda'"),
        (["torchrun", "x.py"], {"scheduler": "slurm", "scheduler_cfg": {"colour": "red"}}, ValueError, "colour"),
        ("torchrun x.py", {}, ValueError, "not str"),
        (SimpleNamespace(roles=[]), {}, ValueError, "one role expected, not 0"),
    ],
)
def test_commands_that_cannot_be_served(
    command: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        serve(command, **options)
