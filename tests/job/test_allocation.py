from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_slurm.job import (
    AddressError,
    AllocationError,
    JobError,
    NodeListError,
    NoSlurmError,
    SlurmAllocation,
    find_address,
)
from monarch_slurm.job.address import _source_address, node_address
from monarch_slurm.job.allocation import gpus_of_nodes
from monarch_slurm.job.nodelist import compress

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


@pytest.mark.parametrize(
    ("array", "command_id"),
    [
        ({}, "12"),
        ({"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}, "12_3"),
        ({"SLURM_ARRAY_JOB_ID": "11", "SLURM_ARRAY_TASK_ID": "3"}, "12"),  # or inherited from the job that submitted it
    ],
)
def test_an_element_of_an_array_is_not_named_by_the_number_of_the_array(array: dict[str, str], command_id: str) -> None:
    assert SlurmAllocation.from_env({**STEP, **array}).command_id == command_id


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


@pytest.mark.parametrize("option", ["lo", "127.0.0.0/8", "127.0.0.1", "::1"])
def test_an_address_that_other_machines_cannot_dial_is_refused(option: str) -> None:
    with pytest.raises(AddressError, match=r"a loopback address, which other machines cannot dial; there are lo"):
        find_address(option, None)


def test_of_a_network_an_address_is_taken_that_others_can_dial(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"lo": ["127.0.0.1"], "eth0": ["169.254.1.1", "10.1.2.3"]}
    monkeypatch.setattr("monarch_slurm.job.address._addresses", lambda: held)
    assert find_address("0.0.0.0/0", None) == "10.1.2.3"
    assert find_address("eth0", None) == "10.1.2.3"
    with pytest.raises(AddressError, match=r"'169.254.0.0/16' is 169.254.1.1 on .*, a link-local address"):
        find_address("169.254.0.0/16", None)


def test_an_address_that_no_packet_can_leave_from_is_refused() -> None:
    with pytest.raises(AddressError, match=r"has no route from 127\.0\.0\.1 to 203\.0\.113\.9"):
        _source_address("203.0.113.9", "127.0.0.1")


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6, unique=True), min_size=2, max_size=5))
def test_every_heterogeneous_job_is_its_components_in_order(groups: list[list[int]]) -> None:
    named = [[f"g{group}-{index:02}" for index in indices] for group, indices in enumerate(groups)]
    env = {"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": str(len(named)), "SLURMD_NODENAME": named[-1][-1]}
    for group, names in enumerate(named):
        env[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"] = compress(names)
        env[f"SLURM_JOB_NUM_NODES_HET_GROUP_{group}"] = str(len(names))
    allocation = SlurmAllocation.from_env(env)
    assert allocation.nodes == tuple(name for names in named for name in names)
    expected = [group for group, names in enumerate(named) for _ in names]
    assert [allocation.group_of(index) for index in range(len(allocation.nodes))] == expected


def test_a_task_of_an_array_is_a_job_of_its_own() -> None:
    array = {"SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "5"}
    assert SlurmAllocation.from_env({**STEP, **array}).job_id == 12


@given(st.dictionaries(st.integers(1, 99), st.tuples(st.integers(0, 8), st.sampled_from(["", "mi300x:"])), min_size=1))
def test_gpus_of_any_shape_are_counted_per_node(counts: dict[int, tuple[int, str]]) -> None:
    lines = [
        f"   Nodes=n{node:02} CPU_IDs=0-7 Mem=1024 GRES=" + (f"gpu:{kind}{count}(IDX:0-{count})" if count else "")
        for node, (count, kind) in counts.items()
    ]
    found = gpus_of_nodes("JobId=3 JobName=x\n" + "\n".join(lines) + "\n")
    assert found == {f"n{node:02}": count for node, (count, _) in counts.items() if count}


def test_a_nodes_address_is_known_with_and_without_scontrol() -> None:
    def tells(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, "NodeName=n1 Arch=x NodeAddr=127.0.0.9 NodeHostName=n1", "")

    def is_missing(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        raise NoSlurmError("no scontrol here")

    def does_not_know(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "Node n1 not found")

    assert node_address("n1", tells) == "127.0.0.9"
    assert node_address("127.0.0.8", is_missing) == "127.0.0.8"
    with pytest.raises(JobError, match="does not tell the address of node n1"):
        node_address("n1", does_not_know)
