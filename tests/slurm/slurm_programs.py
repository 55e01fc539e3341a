"""Programs that tests submit."""

from __future__ import annotations

WHO = """
import os, socket, sys
from monarch_slurm.actor import Actor, endpoint
from monarch_slurm.job import SlurmJob

class Who(Actor):
    @endpoint
    def host(self):
        return socket.gethostname(), os.environ["SLURMD_NODENAME"], os.environ["SLURM_NODEID"]
"""

SURVIVES = (
    WHO
    + """
import time
import monarch_slurm.actor as actor

def note(failure):
    print("fault:", failure.report().splitlines()[0], flush=True)

actor.unhandled_fault_hook = note
hosts = SlurmJob({"hosts": 4}).state().hosts  # all that this job has
who = hosts.spawn_procs().spawn("who", Who)
who.host.call().get()
print("ready", flush=True)
last = None
while not os.path.exists("stop"):
    here = []
    for rank in range(len(hosts)):
        try:
            here.append(who.slice(hosts=rank).host.call_one().get(timeout=60)[0])
        except (actor.SupervisionError, actor.ActorError):
            pass
    if here != last:
        print("answering:", *here, flush=True)
        last = here
    time.sleep(0.05)
"""
)
