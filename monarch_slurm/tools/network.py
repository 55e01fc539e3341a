"""At home in `monarch_slurm.spmd`."""

from monarch_slurm.spmd import AddrType, get_ipaddr, get_sockaddr

__all__ = ["AddrType", "get_ipaddr", "get_sockaddr"]
