"""How long after a node's death its replacement answers, through the references that there were before.

    python bench/replacement.py [--runs 3] [--kinds node,agent] [--json FILE]    # root: the cluster is its own

Each run is a job of three nodes and a spare on a Slurm cluster on this machine. Its program keeps calling an actor on
the second node. Then that node loses its network and its power at once (`node`), or the host agent there is killed by
SIGKILL (`agent`). Seconds since the deed was begun:

noticed    the controller holds the host for lost
replaced   the spare has its place
procs      the process of the new proc has been started on the spare
actors     the actor has been made there
told       `__supervise__` of the owner has been called
answered   the call that waited has come back from the spare, through the reference that there was all the time
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from slurm_cluster import cluster

from monarch_slurm.job import Phase, SlurmJob, follow

PROGRAM = """
import json, logging, os, socket, time
import monarch_slurm.actor as actor
from monarch_slurm.actor import Actor, RestartPolicy, endpoint
from monarch_slurm.job import job_load

def say(**what):
    print(json.dumps(what), flush=True)

class Where(Actor):
    def __init__(self):
        made = time.time()
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        self.answer = {"host": socket.gethostname(), "actors": made, "procs": made - age}
    @endpoint
    def where(self):
        return self.answer

class Owner(Actor):
    def __init__(self, hosts):
        self.where = hosts.spawn_procs(restart=RestartPolicy()).spawn("where", Where)
    @endpoint
    def get(self):
        return self.where
    def __supervise__(self, failure):
        say(noticed=failure.detected_at, told=time.time())
        return True

class Watch(logging.Handler):
    def emit(self, record):
        if "takes its place" in record.msg:
            say(replaced=record.created)

logging.getLogger("monarch_slurm").addHandler(Watch())
hosts = job_load().state().hosts
owner = actor.this_proc().spawn("owner", Owner, hosts)
where = owner.get.call_one().get()
assert len(where.where.call().get()) == 3
where = where.slice(hosts=1)
old = where.where.call_one().get()["host"]
say(ready=old)
while True:
    try:
        answer = where.where.call_one().get(timeout=120)
    except (actor.SupervisionError, actor.ActorError):
        continue  # it was under way when the host was lost
    if answer["host"] != old:
        break
    time.sleep(0.005)
say(answered=time.time(), **answer)
"""

STAGES = ("noticed", "replaced", "procs", "actors", "told", "answered")


def measure(kind: str, folder: Path, call: Callable[..., None]) -> dict[str, float]:
    """Have one node replaced; return the seconds to each of `STAGES`."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    job = SlurmJob({"hosts": 3}, spares=1, log_dir=str(folder))
    job.apply([sys.executable, str(program)])
    _until(lambda: "ready" in _said(job), f"the program of job {job.job_id}")
    node = str(_said(job)["ready"])
    time.sleep(2.0)  # at rest
    agents = _agents(job.folder, node)
    began = time.time()
    if kind == "node":
        call("kill", node)
    else:
        for pid in agents:
            os.kill(pid, signal.SIGKILL)
    with (folder / "out").open("w") as out:
        code = follow(job, out)
    _until(lambda: job.status().phase is Phase.ENDED, f"the end of job {job.job_id}")
    if kind == "node":
        call("heal", node)
    said = _said(job)
    if code != 0 or any(stage not in said for stage in STAGES):
        raise SystemExit((folder / "out").read_text())
    return {stage: said[stage] - began for stage in STAGES}


def _agents(folder: Path, node: str) -> list[int]:
    """Return the pids, as seen from here, of the host agent of ``node`` and of what guards it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # it has ended meanwhile
            if b"monarch_slurm.host" in words and {str(folder).encode(), node.encode()} <= {*words}:
                found.append(int(entry.name))
    return found


def _said(job: SlurmJob) -> dict[str, Any]:
    """Return what the program has told so far."""
    said: dict[str, Any] = {}
    log = job.folder / "controller.log"
    for line in log.read_text().splitlines() if log.exists() else []:
        if line.startswith("{") and line.endswith("}"):
            said = {**json.loads(line), **said}
    return said


def _until(reached: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s in vain for {what}")
        time.sleep(0.05)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kinds", default="node,agent")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    with cluster(4) as call, tempfile.TemporaryDirectory(prefix="bench-replacement-") as scratch:
        for kind in options.kinds.split(","):
            found[kind] = []
            for run in range(options.runs):
                folder = Path(scratch, f"{kind}-{run}")
                folder.mkdir(parents=True)
                found[kind].append(measure(kind, folder, call))
    table = Table(title=f"seconds since the death, median / worst of {options.runs} runs")
    for name in ("killed", *STAGES):
        table.add_column(name, justify="left" if name == "killed" else "right")
    for kind, runs in found.items():
        columns = [[run[stage] for run in runs] for stage in STAGES]
        table.add_row(kind, *(f"{statistics.median(column):.2f} / {max(column):.2f}" for column in columns))
    Console(width=max(110, Console().width)).print(table)
    if options.json:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()}
        options.json.write_text(json.dumps({"machine": machine, "runs": found}, indent=1))


if __name__ == "__main__":
    main()
