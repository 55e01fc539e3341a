from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

import pytest

from monarch_slurm.job.errors import SlurmUnreachableError
from monarch_slurm.job.node_states import describe_nodes, node_states, nodes_for
from monarch_slurm.job.nodelist import compress
from monarch_slurm.job.request import SlurmRequest

SINFO = """\
n1|idle|debug*|96|512000|gpu:mi300x:8(S:0-1),nvme:2|big,fast|none
n1|idle|urgent|96|512000|gpu:mi300x:8(S:0-1),nvme:2|big,fast|none
n2|allocated|debug*|64|256000|gpu:4|big|none
n3|mixed|debug*|8+|1000|(null)|(null)|none
n4|drained|debug*|96|512000|gpu:8|big|bad | fan
n5|down*|debug*|96|512000|gpu:8|big|Not responding
n6|allocated*|debug*|96|512000|gpu:8|big|none
n7|idle~|urgent|96|512000|gpu:8|fast|none
n8|reserved|debug*|96|512000|gpu:8|big|none
n9|draining|debug*|96|512000|gpu:8|big|old
"""


def slurm(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    if command[0] == "scontrol":
        return subprocess.CompletedProcess(command, 0, "ReservationName=night Nodes=n[4,7-8] NodeCnt=3\n", "")
    squeue = "12_3|me|n[2-3]\n14|you|n2\n15|you|n9\n"
    return subprocess.CompletedProcess(command, 0, SINFO if command[0] == "sinfo" else squeue, "")


def test_which_nodes_slurm_can_give() -> None:
    states = node_states(slurm)
    assert {name for name, state in states.items() if state.usable} == {"n1", "n2", "n3", "n7"}
    assert (states["n1"].partitions, states["n1"].features) == ({"debug*", "urgent"}, {"big", "fast"})


def test_why_nodes_are_not_free() -> None:
    states = node_states(slurm, list(node_states(slurm)))
    assert [name for name, state in states.items() if not state.why_not_free] == ["n1", "n7"]
    assert describe_nodes(states[name] for name in ("n2", "n3", "n4", "n5", "n6", "n8", "n9")) == (
        "n2 is allocated to job 12_3 of me, job 14 of you; n3 is shared by job 12_3 of me; n4 is drained (bad | fan); "
        "n5 is down (Not responding), and does not answer; n6 is allocated, and does not answer; n8 is reserved; "
        "n9 is draining (old)"
    )


@pytest.mark.parametrize(
    ("wishes", "names"),
    [
        ({}, "n[1-3]"),
        ({"partition": "urgent"}, "n[1,7]"),
        ({"partition": "debug,urgent"}, "n[1-3,7]"),
        ({"exclude": "n[1-2]"}, "n3"),
        ({"gpus_per_node": 8}, "n1"),
        ({"gpus_per_node": 4}, "n[1-2]"),
        ({"cpus_per_task": 9}, "n[1-2]"),
        ({"mem": "300G"}, "n1"),
        ({"mem": "100M"}, "n[1-3]"),
        ({"constraint": "big"}, "n[1-2]"),
        ({"constraint": "big&fast"}, "n1"),
        ({"constraint": "fast|big"}, "n[1-2]"),
        ({"constraint": "[rack1*2&rack2*4]"}, ""),  # cannot be told
        ({"gres": "gpu:mi300x:8,nvme:1"}, "n1"),
        ({"gres": "gpu:4"}, "n[1-2]"),
        ({"gres": "fpga"}, ""),
        ({"reservation": "night", "partition": "debug,urgent"}, "n[7-8]"),
    ],
)
def test_which_nodes_a_job_can_get(wishes: dict[str, Any], names: str) -> None:
    (found,) = nodes_for([SlurmRequest(1, "job", "python", **wishes)], slurm)
    assert compress(sorted(found)) == names


def test_a_silent_slurm_tells_nothing() -> None:
    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        raise SlurmUnreachableError("sinfo did not answer within 5 s")

    assert node_states(run, ["n1"]) == {}
