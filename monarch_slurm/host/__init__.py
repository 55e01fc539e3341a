"""The host agent and the controller's end of its link: procs are spawned, watched, logged and ended here.

- `agent`: the process per node; `start` starts it, `guardian` cleans up after it
- `procs`, `zygote`, `zygote_link`, `proc`, `orphans`: how a proc comes and goes, and what it leaves behind
- `logs`, `output`, `exits`: what it printed, how it ended
- `hub`: the controller's side: who has joined, who has died; `places`: who has taken whose place
- `lease`, `doorbell`: whether the controller is still there
- `kernel`: the Linux calls under all that
"""

from monarch_slurm.host.exits import FailureKind, HostDown, ProcDown
from monarch_slurm.host.hub import HostInfo, Hub
from monarch_slurm.host.identity import ADDRESS_VARIABLE, NoControllerError
from monarch_slurm.host.start import AgentProcess, serve, start_local_agent

__all__ = [
    "ADDRESS_VARIABLE",
    "AgentProcess",
    "FailureKind",
    "HostDown",
    "HostInfo",
    "Hub",
    "NoControllerError",
    "ProcDown",
    "serve",
    "start_local_agent",
]
