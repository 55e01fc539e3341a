from __future__ import annotations

import socket

import pytest

from monarch_slurm.job import AddressError, AllocationError, NodeListError, SlurmAllocation, find_address
from monarch_slurm.job.allocation import gpus_of_nodes

STEP = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "rack[1-2]n[01-02]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "rack1n02",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}


def test_an_allocation_is_read_from_the_environment() -> None:
    allocation = SlurmAllocation.from_env(STEP)
    assert allocation.nodes == ("rack1n01", "rack1n02", "rack2n01", "rack2n02")
    assert (allocation.job_id, allocation.node_id, allocation.node_name) == (12, 1, "rack1n02")
    assert not allocation.is_head
    assert (allocation.launch_address, allocation.restarts) == ("10.0.0.1", 0)


def test_a_batch_script_runs_on_the_head() -> None:
    batch = {name: value for name, value in STEP.items() if name not in ("SLURM_NODEID", "SLURM_LAUNCH_NODE_IPADDR")}
    allocation = SlurmAllocation.from_env({**batch, "SLURM_RESTART_COUNT": "2"})
    assert allocation.is_head
    assert (allocation.launch_address, allocation.restarts) == ("", 2)


def test_where_salloc_was_called_is_no_node_of_the_job() -> None:
    allocation = SlurmAllocation.from_env({name: value for name, value in STEP.items() if name != "SLURMD_NODENAME"})
    assert allocation.node_name == ""
    assert not allocation.is_head


@pytest.mark.parametrize("missing", ["SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES"])
def test_outside_of_a_job_the_error_says_what_is_missing(missing: str) -> None:
    with pytest.raises(AllocationError, match=f"not in a job of Slurm: {missing} is not set"):
        SlurmAllocation.from_env({name: value for name, value in STEP.items() if name != missing})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"SLURM_JOB_NUM_NODES": "5"}, "names 4 nodes.*SLURM_JOB_NUM_NODES"),
        ({"SLURMD_NODENAME": "login1"}, "login1, is not one of"),
        ({"SLURM_NODEID": "x"}, "makes no sense"),
    ],
)
def test_an_allocation_that_contradicts_itself_is_refused(change: dict[str, str], match: str) -> None:
    with pytest.raises(AllocationError, match=match):
        SlurmAllocation.from_env({**STEP, **change})


HET = {
    "SLURM_JOB_ID": "7",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST": "n5",  # in a step these tell of the step
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-2]",
    "SLURM_JOB_NUM_NODES_HET_GROUP_0": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n5",
    "SLURM_JOB_NUM_NODES_HET_GROUP_1": "1",
    "SLURMD_NODENAME": "n5",
}


def test_the_components_of_a_heterogeneous_job_are_one_allocation() -> None:
    allocation = SlurmAllocation.from_env(HET)
    assert allocation.nodes == ("n1", "n2", "n5")
    assert [allocation.group_of(index) for index in range(4)] == [0, 0, 1, None]
    assert SlurmAllocation.from_env(STEP).group_of(0) is None
    with pytest.raises(AllocationError, match="node n2 is in two components"):
        SlurmAllocation.from_env({**HET, "SLURM_JOB_NODELIST_HET_GROUP_1": "n2", "SLURMD_NODENAME": "n2"})


def test_the_gpus_of_each_node_are_read_from_the_details_of_a_job() -> None:
    details = (
        "JobId=7 JobName=x\n   NumNodes=3 NumCPUs=3\n   JOB_GRES=gpu:12\n"
        "     Nodes=n[1-2] CPU_IDs=15 Mem=0 GRES=gpu:4(IDX:0-3)\n"
        "     Nodes=n3 CPU_IDs=15 Mem=0 GRES=gpu:mi300:3(IDX:0-2),gpu:old:1(IDX:7),nic:2(IDX:0-1)\n"
        "     Nodes=n4 CPU_IDs=15 Mem=0 GRES=\n"
    )
    assert gpus_of_nodes(details) == {"n1": 4, "n2": 4, "n3": 4}


def test_a_node_list_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(NodeListError):
        SlurmAllocation.from_env({**STEP, "SLURM_JOB_NODELIST": "n[1-2"})


def test_the_fastest_link_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch_slurm.job.address.fastest_address", lambda held: "10.1.2.3" if "lo" in held else None)
    assert find_address("fastest", "127.0.0.1") == "10.1.2.3"
    monkeypatch.setattr("monarch_slurm.job.address.fastest_address", lambda held: None)
    with pytest.raises(AddressError, match="no address in 'fastest'; there are lo"):
        find_address("fastest", "127.0.0.1")


@pytest.mark.parametrize("option", ["lo", "127.0.0.0/8", "127.0.0.1", None])
def test_an_address_is_one_of_this_machine(option: str | None) -> None:
    assert find_address(option, "127.0.0.1") == "127.0.0.1"


def test_no_hostname_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("looked up")

    for name in ("getaddrinfo", "gethostbyname", "getfqdn"):
        monkeypatch.setattr(socket, name, fail)
    assert find_address(None, "127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ("ib7", "no interface.*lo"),
        ("203.0.113.0/24", "no address in '203.0.113.0/24'; there are lo"),
        ("203.0.113.1", "no address"),
    ],
)
def test_an_address_that_is_not_here_is_refused_with_what_is(option: str, match: str) -> None:
    with pytest.raises(AddressError, match=match):
        find_address(option, "127.0.0.1")
