"""Programs that tests submit."""

from __future__ import annotations

WHO = """
import os, socket, sys
from monarch_slurm.actor import Actor, endpoint
from monarch_slurm.job import SlurmJob

class Who(Actor):
    def __init__(self):
        print("an actor on", socket.gethostname(), flush=True)

    @endpoint
    def host(self):
        return socket.gethostname(), os.environ["SLURMD_NODENAME"], os.environ["SLURM_NODEID"]
"""

TELLS = (
    WHO
    + """
import time
import monarch_slurm.actor as actor

def say(text):  # in one piece: failures are noted on another thread, and print() writes in pieces
    sys.stdout.write(text + "\\n")
    sys.stdout.flush()

def note(failure):
    say(f"fault: {failure.report().splitlines()[0]}")

actor.unhandled_fault_hook = note

def tell_who_answers(ask):
    print("ready", flush=True)
    last = None
    while not os.path.exists("stop"):
        here = ask()
        if here not in (None, last):
            say(" ".join(["answering:", *here]))
            last = here
        time.sleep(0.03)
"""
)

SURVIVES = (
    TELLS
    + """
hosts = SlurmJob({"hosts": 4}).state().hosts  # all that this job has
who = hosts.spawn_procs().spawn("who", Who)
who.host.call().get()

def ask():
    here = []
    for rank in range(len(hosts)):
        try:
            here.append(who.slice(hosts=rank).host.call_one().get(timeout=60)[0])
        except (actor.SupervisionError, actor.ActorError):
            pass
    return here

tell_who_answers(ask)
"""
)

KEPT = (
    TELLS
    + """
from monarch_slurm.actor import RestartPolicy

class Owner(Actor):
    def __init__(self, hosts):
        self.who = hosts.spawn_procs(restart=RestartPolicy(max_restarts=100)).spawn("who", Who)

    @endpoint
    def get(self):
        return self.who

    def __supervise__(self, failure):
        how = "restarted" if failure.restarted else "failed"
        print(f"told: {how}, {failure.host} replaced by {failure.replaced_by}", flush=True)
        return True

from monarch_slurm.actor.client import client
from monarch_slurm.job import job_load
hosts = job_load().state().hosts
owner = actor.this_proc().spawn("owner", Owner, hosts)
who = owner.get.call_one().get()
joined = None

def ask():
    global joined
    names = sorted(info.name for info in client().joined)
    if names != joined:
        print("joined:", *names, flush=True)
        joined = names
    try:
        return [name for name, _, _ in who.host.call().get(timeout=60).values()]
    except (actor.SupervisionError, actor.ActorError):
        return None

tell_who_answers(ask)
"""
)

COUNTS = (
    WHO
    + """
import time
from monarch_slurm.job import save_on_notice

class Counter(Actor):
    def __init__(self, start):
        self.count = start
    @endpoint
    def add(self):
        self.count += 1
    @endpoint
    def save(self):
        with open("aside", "w") as file:
            file.write(str(self.count))
        os.replace("aside", "count")
        return self.count

start = int(open("count").read()) if os.path.exists("count") else 0
hosts = SlurmJob({"hosts": 2}).state().hosts
counter = hosts.slice(hosts=1).spawn_procs().spawn("counter", Counter, start)

def save():
    print("saved", counter.save.call_one().get(), flush=True)

with save_on_notice(save):
    counter.add.call_one().get()
    print("counts from", start, "on", socket.gethostname(), flush=True)
    while not os.path.exists("stop"):
        counter.add.call_one().get()
        time.sleep(0.02)
"""
)
