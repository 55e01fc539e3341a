"""One Python program that drives every GPU of a Slurm allocation, and trains on while parts of it fail.

The layers, each of which imports only those below it:

- ``cli``: the ``monarch-slurm`` command
- ``train``: fault-tolerant training: replicas, quorums, DiLoCo, failure injection, reports
- ``job``: where hosts come from: local processes, Slurm
- ``controller``: waiting for hosts, restart policy, journal
- ``rdma``, ``collectives``: moving memory and tensors between procs
- ``actor``: what users write: actors, endpoints, meshes, futures, ports, supervision
- ``host``: the host agent, which spawns, watches and stops the procs of one host
- ``gpu``: devices and their memory
- ``wire``: frames, pickles, ZeroMQ sockets, keys
- ``config``: settings of the process
"""

from __future__ import annotations

import importlib
import typing

from monarch_slurm._version import __version__

__all__ = ["__version__"]

_HOMES = {
    **dict.fromkeys(
        ("clear_runtime_config", "configure", "configured", "get_global_config", "get_runtime_config"),
        "monarch_slurm.config",
    ),
    **dict.fromkeys(("Extent", "NDSlice", "Shape"), "monarch_slurm.actor"),
}
"""Names that programs written for Monarch look for here, too, and where they are at home."""


def __getattr__(name: str) -> typing.Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
