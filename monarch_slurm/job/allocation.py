"""The Slurm allocation that this process runs in, as its environment tells it, or one that it names.

In a shell that salloc has started, `SlurmAllocation.from_env` and `SlurmAllocation.hosts` give a program at a prompt
the nodes as a mesh of hosts.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from monarch_slurm.job.errors import JobError, NodeListError
from monarch_slurm.job.nodelist import expand
from monarch_slurm.job.status import JobId, Phase, Run, query, run_command

if TYPE_CHECKING:
    from monarch_slurm.actor import HostMesh
    from monarch_slurm.job.container import Container

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
        node_name: Slurm's name of this node; empty on a machine that is none of the job's, as where salloc was called.
        launch_address: IP address of the machine where srun runs, as the nodes reach it; empty outside of a step.
        restarts: how often Slurm has requeued the job.
        groups: number of nodes of each component of a heterogeneous job, in the order of ``nodes``; else empty.
        array_task: index of this job in an array of Slurm whose own number is ``job_id``; else None.
    """

    job_id: int
    nodes: tuple[str, ...]
    node_id: int
    node_name: str
    launch_address: str = ""
    restarts: int = 0
    groups: tuple[int, ...] = ()
    array_task: int | None = None

    @property
    def command_id(self) -> str:
        """The id of this job for Slurm's commands.

        One element of each array has the number of the array as its job id. A command that gets this number acts on all
        elements, so the element is named ``ARRAY_INDEX``. The job ids of the other elements name them alone.
        """
        return str(self.job_id) if self.array_task is None else f"{self.job_id}_{self.array_task}"

    def group_of(self, index: int) -> int | None:
        """Return the component that the node at ``index`` belongs to; None if the job is not heterogeneous."""
        end = 0
        for group, count in enumerate(self.groups):
            end += count
            if index < end:
                return group
        return None

    @property
    def is_head(self) -> bool:
        """Whether this is the node that the controller belongs on."""
        return self.node_id == 0 and bool(self.node_name)

    def hosts(
        self,
        *,
        log_dir: str | Path | None = None,
        address: str | None = None,
        python_exe: str | None = None,
        srun_args: Sequence[str] = (),
        preflight: Sequence[str] = (),
        container: str | Container | None = None,
        take_over: bool = False,
        timeout: float | None = None,
    ) -> HostMesh:
        """Become the controller of the allocation's nodes, and return them as a mesh with dimension ``hosts``.

        For a program at a prompt: a REPL or a notebook in a shell that salloc has started. A host agent is started on
        each node by ``srun --overlap``, beside whatever runs there. All of it ends when this process does, however it
        ends, and the allocation stays; then, or with ``take_over``, another process can have the nodes.

        At a prompt a failure that nobody handles is printed and ends nothing, unless `unhandled_fault_hook` is set. A
        second call returns the same hosts.

        Args:
            log_dir: folder for the session's own folder, which all nodes must see; None takes ``runs`` in the folder
                where the allocation was made.
            address: what others dial on each machine: interface, network or IP address.
            python_exe: command that starts Python on the nodes; None takes the Python that runs here.
            srun_args, preflight, container: as `SlurmJob` has them.
            take_over: end the session of another program, should one have the nodes.
            timeout: seconds that all agents may take to start; None takes the setting ``host_join_timeout``.

        Raises:
            HostsTakenError: another program has the nodes.
            HostStartError: the agent of a node did not come up.
            NoSlurmError, JobFolderError, AddressError
        """
        from monarch_slurm.config import settings
        from monarch_slurm.job.batch import BatchPlan
        from monarch_slurm.job.container import Container
        from monarch_slurm.job.session import start_session
        from monarch_slurm.job.submission import check_commands, default_python

        check_commands()
        plan = BatchPlan(
            program=None,
            python=python_exe or default_python(),
            address=address,
            srun_args=tuple(srun_args),
            preflight=tuple(preflight),
            container=Container(container) if isinstance(container, str) else container,
        )
        base = Path(log_dir) if log_dir is not None else Path(os.environ.get("SLURM_SUBMIT_DIR", ".")) / "runs"
        if timeout is None:
            timeout = settings().host_join_timeout
        return start_session(self, plan, base.absolute(), take_over, timeout)

    @staticmethod
    def from_job(job_id: JobId, run: Run = run_command) -> SlurmAllocation:
        """Return the allocation of a job that runs, for a process whose environment does not tell of it.

        Args:
            job_id: Slurm's number of the job; for an element of an array ``"ARRAY_INDEX"``.

        Raises:
            AllocationError: the job does not run, or is a whole array.
            JobNotFoundError, SlurmUnreachableError, NoSlurmError
        """
        status = query(job_id, run)
        if status.phase is not Phase.RUNNING:
            raise AllocationError(f"{status}; its nodes cannot be used")
        listed = run(["squeue", "-h", "-j", str(job_id), "--sort=i", "-o", "%A|%i|%N"]).stdout.splitlines()
        parts = [line.split("|", 2) for line in listed]
        if not parts:
            raise AllocationError(f"job {job_id} has just ended; its nodes cannot be used")
        number, name = parts[0][:2]
        if len(parts) > 1 and "+" not in name:
            raise AllocationError(f"job {job_id} is an array; name one of its elements, such as {name}")
        array, _, index = name.partition("_")
        components = [tuple(expand(nodes)) for _, _, nodes in parts]
        nodes = tuple(node for component in components for node in component)
        here = socket.gethostname().partition(".")[0]
        return SlurmAllocation(
            int(number),
            nodes,
            nodes.index(here) if here in nodes else 0,
            here if here in nodes else "",
            groups=tuple(map(len, components)) if len(components) > 1 else (),
            array_task=int(index) if index and array == number else None,
        )

    @staticmethod
    def from_env(env: Mapping[str, str] = os.environ) -> SlurmAllocation:
        """Return the allocation that ``env`` describes.

        Raises:
            AllocationError: there is none, or the length of its node list is not its number of nodes.
            NodeListError: its node list cannot be read.
        """
        try:
            job_id = int(env["SLURM_JOB_ID"])
            listed = [_nodes(env, suffix) for suffix in _suffixes(env)]
            node_id, node_name = int(env.get("SLURM_NODEID", "0")), env.get("SLURMD_NODENAME", "")
        except KeyError as missing:
            raise AllocationError(
                f"not in a job of Slurm: {missing.args[0]} is not set here; run this inside of salloc, sbatch or srun"
            ) from None
        except NodeListError:
            raise
        except ValueError as error:
            raise AllocationError(f"Slurm's environment makes no sense here: {error}") from None
        nodes = tuple(name for names in listed for name in names)
        if len(set(nodes)) < len(nodes) and len(listed) > 1:
            twice = next(name for name in nodes if nodes.count(name) > 1)
            raise AllocationError(f"node {twice} is in two components of this job; ask for exclusive nodes")
        if node_name and node_name not in nodes:
            raise AllocationError(f"this node, {node_name}, is not one of the job's nodes: {', '.join(nodes)}")
        return SlurmAllocation(
            job_id,
            nodes,
            node_id,
            node_name,
            env.get("SLURM_LAUNCH_NODE_IPADDR", ""),
            int(env.get("SLURM_RESTART_COUNT", "0")),
            tuple(map(len, listed)) if len(listed) > 1 else (),
            _array_task(env, job_id),
        )


def _array_task(env: Mapping[str, str], job_id: int) -> int | None:
    """Return the index of the element of an array whose job id is the number of the array.

    Other array variables say nothing: a job that an element of an array submits inherits those of that element.
    """
    return int(env["SLURM_ARRAY_TASK_ID"]) if env.get("SLURM_ARRAY_JOB_ID") == str(job_id) else None


def _suffixes(env: Mapping[str, str]) -> list[str]:
    """Return what the names of variables that describe each component end with."""
    # In a step of a heterogeneous job the variables without a suffix describe the step.
    return [f"_HET_GROUP_{index}" for index in range(int(env.get("SLURM_HET_SIZE", "0")))] or [""]


def _nodes(env: Mapping[str, str], suffix: str) -> list[str]:
    """Return the nodes that two variables of ``env`` agree on."""
    node_list, count = env[f"SLURM_JOB_NODELIST{suffix}"], int(env[f"SLURM_JOB_NUM_NODES{suffix}"])
    names = expand(node_list)
    if len(names) != count:
        raise AllocationError(
            f"SLURM_JOB_NODELIST{suffix}={node_list} names {len(names)} nodes, SLURM_JOB_NUM_NODES{suffix}={count}"
        )
    return names
