"""Programs for torchrun on a mesh of procs: one rank per proc, rendezvous through environment variables.

- `spmd_actor`: the actor that sets the variables and runs the program
- `env_rendezvous`: where the ranks of a program meet
- `elastic_env`: the variables for actors of your own
- `torchrun`: a torchrun command line on a mesh of hosts
- `network`: addresses that ranks can dial
"""

from monarch_slurm.spmd.elastic_env import setup_torch_elastic_env, setup_torch_elastic_env_async
from monarch_slurm.spmd.network import AddrType, get_ipaddr, get_sockaddr
from monarch_slurm.spmd.spmd_actor import SPMDActor
from monarch_slurm.spmd.torchrun import run_spmd

__all__ = [
    "AddrType",
    "SPMDActor",
    "get_ipaddr",
    "get_sockaddr",
    "run_spmd",
    "setup_torch_elastic_env",
    "setup_torch_elastic_env_async",
]
