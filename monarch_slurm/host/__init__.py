"""The host agent and the controller's end of its link: procs are spawned, watched, logged and ended here.

- `agent`: the process per node; `start` starts it
- `procs`, `zygote`, `proc`: how a proc comes and goes
- `logs`, `exits`: what it printed, how it ended
- `hub`: the controller's side: who has joined, who has died
- `kernel`: the Linux calls under all that
"""

from monarch_slurm.host.exits import HostDown, ProcDown
from monarch_slurm.host.hub import HostInfo, Hub
from monarch_slurm.host.start import NoControllerError, serve, start_local_agent

__all__ = ["HostDown", "HostInfo", "Hub", "NoControllerError", "ProcDown", "serve", "start_local_agent"]
