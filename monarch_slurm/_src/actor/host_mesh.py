"""At home in `monarch_slurm.actor`."""

from monarch_slurm.actor import HostMesh, this_host, this_proc

__all__ = ["HostMesh", "this_host", "this_proc"]
