"""The Slurm allocation that this process runs in, as its environment tells it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from monarch_slurm.job.errors import JobError
from monarch_slurm.job.nodelist import expand

_NODE_GPUS = re.compile(r"^\s*Nodes=(\S+) .*\bGRES=(\S+)", re.MULTILINE)
_GPU_COUNT = re.compile(r"\bgpu:(?:[^:,(]+:)?([0-9]+)\(")


def gpus_of_nodes(details: str) -> dict[str, int]:
    """Return the number of GPUs that a job has on each node, from what ``scontrol show job --details`` says.

    Raises:
        NodeListError: a node list in it cannot be read.
    """
    return {
        node: sum(map(int, _GPU_COUNT.findall(gres)))
        for nodes, gres in _NODE_GPUS.findall(details)
        for node in expand(nodes)
    }


class AllocationError(JobError):
    """This process does not run in an allocation of Slurm, or in one that contradicts itself."""


@dataclass(frozen=True)
class SlurmAllocation:
    """One allocation, seen from one of its nodes.

    Attributes:
        job_id: Slurm's number of the job.
        nodes: names of all nodes, as allocated; a node that was lost since is still among them. Positions need not be
            node ids.
        node_id: ``SLURM_NODEID`` of this node within the job step; the node with 0 is the head.
        node_name: Slurm's name of this node.
        launch_address: IP address of the machine where srun runs, as the nodes reach it; empty outside of a step.
        restarts: how often Slurm has requeued the job.
    """

    job_id: int
    nodes: tuple[str, ...]
    node_id: int
    node_name: str
    launch_address: str = ""
    restarts: int = 0

    @property
    def is_head(self) -> bool:
        """Whether this is the node that the controller belongs on."""
        return self.node_id == 0

    @staticmethod
    def from_env(env: Mapping[str, str] = os.environ) -> SlurmAllocation:
        """Return the allocation that ``env`` describes.

        Raises:
            AllocationError: there is none, or the length of its node list is not its number of nodes.
            NodeListError: its node list cannot be read.
        """
        try:
            job_id, node_list = int(env["SLURM_JOB_ID"]), env["SLURM_JOB_NODELIST"]
            count = int(env["SLURM_JOB_NUM_NODES"])
            node_id, node_name = int(env.get("SLURM_NODEID", "0")), env["SLURMD_NODENAME"]
        except KeyError as missing:
            raise AllocationError(f"not in a job of Slurm: {missing.args[0]} is not set here") from None
        except ValueError as error:
            raise AllocationError(f"Slurm's environment makes no sense here: {error}") from None
        nodes = tuple(expand(node_list))
        if len(nodes) != count:
            raise AllocationError(
                f"SLURM_JOB_NODELIST={node_list} names {len(nodes)} nodes, SLURM_JOB_NUM_NODES={count}"
            )
        if node_name not in nodes:
            raise AllocationError(f"this node, {node_name}, is not in SLURM_JOB_NODELIST={node_list}")
        launch_address = env.get("SLURM_LAUNCH_NODE_IPADDR", "")
        return SlurmAllocation(
            job_id, nodes, node_id, node_name, launch_address, int(env.get("SLURM_RESTART_COUNT", "0"))
        )
