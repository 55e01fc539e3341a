"""At home in `monarch_slurm.actor`."""

from monarch_slurm.actor import (
    BootstrapCommand,
    Future,
    HostMesh,
    ProcMesh,
    default_bootstrap_cmd,
    this_host,
    this_proc,
)

__all__ = ["BootstrapCommand", "Future", "HostMesh", "ProcMesh", "default_bootstrap_cmd", "this_host", "this_proc"]
