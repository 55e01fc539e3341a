"""The part of a node that goes with some of its GPUs, for jobs that share nodes with others.

Without a word on CPUs and memory Slurm gives such a job one CPU of each node, and memory as the site has set it.
"""

from __future__ import annotations

import re
from dataclasses import replace

from monarch_slurm.job.request import SlurmRequest
from monarch_slurm.job.status import Run, run_command

_GPUS = re.compile(r"\bgpu:(?:[^:,(]+:)?([0-9]+)")


def with_share(request: SlurmRequest, run: Run = run_command) -> SlurmRequest:
    """Return ``request`` with the CPUs and the memory that go with its GPUs, where it says nothing of them itself.

    A job that shares nodes and names a partition and its GPUs per node gets as much of each node as of the node's GPUs,
    by the smallest node of the partition that has so many GPUs. Otherwise nothing is changed.
    """
    gpus = request.gpus_per_node
    if request.exclusive or request.components or request.partition is None or gpus is None:
        return request
    if any(argument.startswith(("-c", "--cpus", "--mem")) for argument in request.slurm_args):
        return request
    shares = []
    for line in run(["sinfo", "-h", "-N", "-p", request.partition, "-o", "%c|%m|%G"]).stdout.splitlines():
        cpus, memory, resources = line.split("|", 2)
        there = sum(map(int, _GPUS.findall(resources)))
        if there >= gpus and cpus.isdecimal() and memory.isdecimal():
            shares.append((int(cpus) * gpus // there, int(memory) * gpus // there))
    if not shares:
        return request
    cpus_share, memory_share = min(cpus for cpus, _ in shares), min(memory for _, memory in shares)
    return replace(
        request,
        cpus_per_task=request.cpus_per_task or max(1, cpus_share),
        mem=request.mem or (f"{memory_share}M" if memory_share else None),
    )
