from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import DEADLINE, REPOSITORY

from monarch_slurm.actor import Actor, ActorError, ProcMesh, endpoint, this_host
from monarch_slurm.job import ProcessJob
from monarch_slurm.spmd import (
    AddrType,
    SPMDActor,
    get_ipaddr,
    get_sockaddr,
    run_spmd,
    setup_torch_elastic_env,
    setup_torch_elastic_env_async,
)
from monarch_slurm.spmd.torchrun import TorchrunError, parse_torchrun

NAMES = ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
         "ROLE_NAME", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]  # fmt: skip

ALL_REDUCE = """
import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(value)
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    file.write(f"{value.item()} {os.environ['LOCAL_RANK']} {__name__} {sys.argv[2:]}")
dist.destroy_process_group()
"""


class Reader(Actor):
    @endpoint
    def read(self) -> dict[str, str]:
        return {name: os.environ.get(name, "") for name in NAMES}


@pytest.fixture
def procs() -> Iterator[ProcMesh]:
    mesh = this_host().spawn_procs({"node": 2, "gpus": 2})
    yield mesh
    mesh.stop().get(DEADLINE)


def check(values: list[dict[str, str]]) -> None:
    for rank, found in enumerate(values):
        local, group = rank % 2, rank // 2
        assert [found[name] for name in NAMES[:9]] == [
            str(value) for value in (rank, local, 2, group, 2, rank, 4, "rank", 4)
        ]
    assert len({(found["MASTER_ADDR"], found["MASTER_PORT"]) for found in values}) == 1


def test_the_variables_of_torchrun(procs: ProcMesh) -> None:
    setup_torch_elastic_env(procs)
    reader = procs.spawn("reader", Reader)
    check(list(reader.read.call().get(DEADLINE).values()))
    asyncio.run(setup_torch_elastic_env_async(procs, "10.0.0.1", 1234))
    values = list(reader.read.call().get(DEADLINE).values())
    check(values)
    assert (values[0]["MASTER_ADDR"], values[0]["MASTER_PORT"]) == ("10.0.0.1", "1234")
    with pytest.raises(AssertionError, match="belong together"):
        setup_torch_elastic_env(procs, master_addr="10.0.0.1")


def test_a_program_over_hosts_reduces(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(ALL_REDUCE)
    job = ProcessJob({"hosts": 2}, env={"PYTHONPATH": str(REPOSITORY)})
    hosts = job.state(cached_path=None).hosts
    command = ["torchrun", "--nnodes=2", "--nproc-per-node", "2", str(tmp_path / "program.py"), str(tmp_path), "--x"]
    run_spmd(hosts, command)
    job.kill()
    assert [(tmp_path / str(rank)).read_text() for rank in range(4)] == [
        f"10.0 {rank % 2} __main__ ['--x']" for rank in range(4)
    ]


def test_a_program_that_fails_is_told_with_its_rank(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import os, sys; sys.exit(5 if os.environ['RANK'] == '1' else 0)")
    with pytest.raises(ActorError, match=r"rank 1: .*program.py exited with 5"):
        run_spmd(this_host(), [str(tmp_path / "program.py")], nproc_per_node=2)


def test_programs_that_are_none(procs: ProcMesh) -> None:
    actors = procs.slice(node=0, gpus=0).spawn("spmd", SPMDActor)
    for arguments in ([], ["-m"]):
        with pytest.raises(ActorError, match="names no program"):
            actors.main.call_one("127.0.0.1", 1, arguments).get(DEADLINE)
    host, port = actors.get_host_port.call_one(AddrType.IPv4).get(DEADLINE)
    assert host.count(".") == 3
    assert 0 < port < 65536


@pytest.mark.parametrize(
    ("command", "count", "program"),
    [
        ("torchrun --nproc_per_node=8 --standalone train.py --lr 1", 8, "train.py --lr 1"),
        ("/opt/bin/torchrun --nproc-per-node 2 -m pkg.train -x", 2, "-m pkg.train -x"),
        ("python -m torch.distributed.run --rdzv-backend c10d train.py", 1, "train.py"),
        ("train.py --nproc-per-node=3", 1, "train.py --nproc-per-node=3"),
    ],
)
def test_command_lines(command: str, count: int, program: str) -> None:
    assert parse_torchrun(command.split()) == (count, program.split())


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("torchrun", "no program"),
        ("torchrun --nproc-per-node", "needs a value"),
        ("torchrun --nproc-per-node=gpu x.py", "--nproc-per-node gpu"),
        ("torchrun --no-python ls", "only Python programs"),
        ("torchrun --unheard x.py", "not known here"),
    ],
)
def test_command_lines_that_cannot_be_followed(command: str, text: str) -> None:
    with pytest.raises(TorchrunError, match=text):
        parse_torchrun(command.split())


def test_addresses_by_name() -> None:
    assert get_sockaddr("127.0.0.1", 80) == "127.0.0.1:80"
    assert get_sockaddr("localhost", 80, AddrType.IPv4) == "127.0.0.1:80"
    assert get_sockaddr("::1", 80) == "[::1]:80"
    assert get_ipaddr("::1", 80, AddrType.IPv6) == "::1"
    with pytest.raises(RuntimeError, match="no address"):
        get_sockaddr("no-such-host.invalid", 80)
