"""Procs use the network that was chosen for data, for whatever address they give to others."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slurm_nodes import Cluster, wait_until
from slurm_programs import WHO

from monarch_slurm.job import Phase, SlurmJob, follow

Program = Callable[[str], list[str]]

TELLS = (
    WHO
    + """
import psutil, torch
from monarch_slurm.rdma import RDMABuffer

class Tells(Actor):
    def __init__(self):
        self.data = torch.arange(1000.0)
    @endpoint
    def told(self):
        return [os.environ[name] for name in ("MONARCH_SLURM_ADDRESS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")]
    @endpoint
    def buffer(self):
        return RDMABuffer(self.data.view(torch.uint8))
    @endpoint
    def read(self, buffer):
        here = torch.zeros(1000)
        buffer.read_into(here.view(torch.uint8)).get()
        peers = sorted({c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "ESTABLISHED"})
        return float(here.sum()), peers

from monarch_slurm.job import job_load
hosts = job_load().state().hosts
tells = hosts.spawn_procs().spawn("tells", Tells)
print(*tells.told.call().get().values(), flush=True)
buffer = tells.slice(hosts=0).buffer.call_one().get()
print(*tells.slice(hosts=1).read.call_one(buffer).get(), flush=True)
"""
)


@pytest.fixture
def second_network(cluster: Cluster) -> Iterator[str]:
    """A second network on the nodes' interface; all can reach one another there, too."""
    for index, node in enumerate(cluster.nodes):
        cluster.call("exec", node, "ip", "addr", "add", f"10.77.5.{index + 1}/24", "dev", "eth0")
    yield "10.77.5.0/24"
    for index, node in enumerate(cluster.nodes):
        cluster.call("exec", node, "ip", "addr", "del", f"10.77.5.{index + 1}/24", "dev", "eth0")


def test_data_goes_over_the_chosen_network(cluster: Cluster, program: Program, second_network: str) -> None:
    job = SlurmJob({"hosts": 2}, nodelist="n[1-2]", data_address=second_network)
    job.apply(program(TELLS))
    out = io.StringIO()
    assert follow(job, out) == 0, out.getvalue()
    told, read = out.getvalue().splitlines()
    assert told == "['10.77.5.1', 'eth0', '=eth0'] ['10.77.5.2', 'eth0', '=eth0']"
    assert read == "499500.0 ['10.77.5.2']"
    wait_until(lambda: job.status().phase is Phase.ENDED, "end of the job")


def test_a_node_without_the_chosen_network_is_named(cluster: Cluster, program: Program, tmp_path: Path) -> None:
    job = SlurmJob({"hosts": 1}, data_address="10.78.0.0/16")
    job.apply(program(TELLS))
    out = io.StringIO()
    assert follow(job, out) == 1
    assert "has no address in '10.78.0.0/16'; there are lo (127.0.0.1" in out.getvalue()
    assert "Traceback" not in out.getvalue()


@pytest.fixture
def shared_address(cluster: Cluster) -> Iterator[str]:
    """An address that each node has, as bridges to containers have."""
    for node in cluster.nodes:
        cluster.call("exec", node, "ip", "addr", "add", "172.17.0.1/24", "dev", "lo")
    yield "172.17.0.0/24"
    for node in cluster.nodes:
        cluster.call("exec", node, "ip", "addr", "del", "172.17.0.1/24", "dev", "lo")


def test_an_address_that_all_nodes_have_is_told_by_the_one_that_cannot_dial(
    cluster: Cluster, program: Program, shared_address: str
) -> None:
    command = [sys.executable, "-m", "monarch_slurm", "submit", "--nodes", "2", "-w", "n[1-2]", "--follow"]
    done = subprocess.run(
        [*command, "--address", shared_address, *program(TELLS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout.startswith("error: the agents of 1 of 2 hosts could not start\n")
    assert "n2 cannot dial the controller at 172.17.0.1 port" in done.stdout
    assert "That is an address of n2 itself (lo)" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_an_interface_that_the_head_lacks_is_told_without_a_traceback(cluster: Cluster, program: Program) -> None:
    command = [sys.executable, "-m", "monarch_slurm", "submit", "--nodes", "2", "--follow", "--address", "ib7"]
    done = subprocess.run([*command, *program(TELLS)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count("\n")) == (1, 1)
    assert done.stdout.startswith("error: 'ib7' is no interface of n1")
