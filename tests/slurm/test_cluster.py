from __future__ import annotations

import socket

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from slurm_nodes import Cluster, wait_until

from monarch_slurm.job.nodelist import compress, expand


def reaches(cluster: Cluster, node: str) -> bool:
    address = next(
        word.partition("=")[2]
        for word in cluster.run("scontrol", "show", "node", node).split()
        if word.startswith("NodeAddr=")
    )
    try:
        socket.create_connection((address, 6818), timeout=1).close()
    except OSError:
        return False
    return True


def test_every_node_has_a_name_and_an_address_of_its_own(cluster: Cluster) -> None:
    said = cluster.run("srun", "-N4", "bash", "-c", "hostname; ip -4 -br addr show eth0 | awk '{print $3}'").split()
    assert len(set(said)) == 8
    assert set(cluster.nodes) <= set(said)


@pytest.mark.parametrize("how", ["cut", "kill"])
def test_a_node_can_be_lost_and_come_back(cluster: Cluster, how: str) -> None:
    assert reaches(cluster, "n3")
    cluster.cut("n3") if how == "cut" else cluster.kill("n3")
    assert not reaches(cluster, "n3")
    assert reaches(cluster, "n2")
    cluster.heal("n3")
    wait_until(lambda: reaches(cluster, "n3"), "n3 to be back")


@pytest.mark.parametrize(
    "text",
    [
        "n[1-4]", "nodes[006,011]", "host[001,003-004,006]", "nodeA,nodeB[001,003],nodeC", "d05-[41-42]", "n[01-3]",
        "n[098-101]", "n[9-10,10]", "a[1-2]b[3-5]", "a[1-3]b[3-4]c[5-6]", "a[1-2]b[3-4]c[5-6]d[7-8]", "[1-3]",
        " n[1-2] , n5", "n[1-2] n4", "n,,m", "n[001-0002]", "n[8-010]", "n[1-2][3-4]",
    ],
)  # fmt: skip
def test_lists_expand_as_here(cluster: Cluster, text: str) -> None:
    assert expand(text) == cluster.run("scontrol", "show", "hostnames", text).split()


@given(
    st.lists(
        st.builds("{}{:0{}}".format, st.sampled_from(["n", "rack1n", "g-"]), st.integers(0, 120), st.integers(1, 4)),
        min_size=1,
        max_size=30,
    )
)
@hypothesis_settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_slurm_reads_and_writes_the_same_lists(cluster: Cluster, names: list[str]) -> None:
    assert cluster.run("scontrol", "show", "hostnames", compress(names)).split() == names
    assert expand(cluster.run("scontrol", "show", "hostlist", ",".join(names)).strip()) == names
