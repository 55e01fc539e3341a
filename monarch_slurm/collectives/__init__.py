"""Collectives among processes: RCCL or NCCL on GPUs, gloo on CPUs, behind one interface.

- `communicator`: `Communicator`, one rank's end, with every operation
- `mesh`: communicators over the dimensions of a mesh of procs, their abort and re-making
- `rendezvous`: what one rank makes and sends to the others
- `job_store`: a torch ``Store`` over the job's messages, whose keys a `StoreActor` holds
- `proof`: ranks prove that they belong to a group
- `ccl`, `gloo`: the two transports; `checks`: what is refused; `partition`: which ranks belong together
- `c10d`: the torch.distributed backend ``monarch``
"""

from monarch_slurm.collectives.communicator import Communicator
from monarch_slurm.collectives.errors import CollectiveError, CommunicatorClosedError, PeerLostError
from monarch_slurm.collectives.rendezvous import Invitation, invite
from monarch_slurm.collectives.store_actor import StoreActor
from monarch_slurm.collectives.work import Work

__all__ = [
    "CollectiveError",
    "Communicator",
    "CommunicatorClosedError",
    "Invitation",
    "PeerLostError",
    "StoreActor",
    "Work",
    "invite",
]
