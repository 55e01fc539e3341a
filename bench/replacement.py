"""How long a lost node is missing: until an actor on a spare answers in the place of the one on it.

Starts the test cluster of four nodes (``tests/slurm_cluster.sh``, as root). A node of a job with a spare loses its
power, or its agent is killed; the procs have a restart policy.

    python bench/replacement.py [--runs 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from monarch_slurm.job import Phase, SlurmJob

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "tests" / "slurm_cluster.sh"
DEADLINE = 180.0

PROGRAM = """
import socket, time
from pathlib import Path
import monarch_slurm.actor as actor
from monarch_slurm.actor import Actor, RestartPolicy, SupervisionError, endpoint
from monarch_slurm.job import job_load

class Who(Actor):
    @endpoint
    def host(self):
        return socket.gethostname()

who = job_load().state().hosts.spawn_procs(restart=RestartPolicy(max_restarts=100)).spawn("who", Who)
last = None
while not Path("stop").exists():
    try:
        names = list(who.host.call().get().values())
    except SupervisionError:
        if last is not None:
            print("noticed", time.time(), flush=True)
            last = None
        continue
    if names != last:
        print("answered", time.time(), *names, flush=True)
        last = names
    time.sleep(0.005)
"""


class Cluster:
    """The test cluster, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._env = {**os.environ, "SLURM_LOCAL_DIR": str(folder)}
        self.call("up", "4")
        os.environ["SLURM_CONF"] = str(folder / "etc" / "slurm.conf")

    def call(self, *arguments: str) -> None:
        subprocess.run(["bash", str(CLUSTER), *arguments], env=self._env, check=True, stdout=subprocess.DEVNULL)

    def wait_idle(self) -> None:
        wait_for(lambda: not slurm("squeue", "-h") and slurm("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * 4)


def slurm(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > end:
            sys.exit(f"waited {DEADLINE:g} s in vain")
        time.sleep(0.02)


def said(log: Path, word: str, after: float = 0.0, end: str = "") -> float | None:
    """The first time that the program said ``word`` after a time, in a line with this end."""
    for line in log.read_text().splitlines() if log.exists() else []:
        words = line.split()
        if words and words[0] == word and float(words[1]) > after and line.endswith(end):
            return float(words[1])
    return None


def start() -> tuple[SlurmJob, Path]:
    """Submit the program; return its job and its log once all nodes have answered."""
    Path("stop").unlink(missing_ok=True)
    Path("program.py").write_text(PROGRAM)
    job = SlurmJob({"hosts": 3}, spares=1)
    job.apply("program.py")
    log = job.folder / "controller.log"
    wait_for(lambda: said(log, "answered", end="n1 n2 n3"))
    return job, log


def finish(job: SlurmJob, cluster: Cluster) -> None:
    Path("stop").touch()
    wait_for(lambda: job.status().phase is Phase.ENDED)
    for node in ("n2", "n4"):
        cluster.call("heal", node)
    cluster.wait_idle()


def replacement(cluster: Cluster, how: str) -> dict[str, float]:
    job, log = start()
    before = time.time()
    if how == "power":
        cluster.call("kill", "n2")
    else:
        cluster.call("exec", "n2", "pkill", "-9", "-f", "monarch_slurm.host --folder")
    wait_for(lambda: said(log, "answered", before, "n1 n4 n3"))
    noticed, answered = said(log, "noticed", before), said(log, "answered", before, "n1 n4 n3")
    finish(job, cluster)
    assert noticed is not None
    assert answered is not None
    return {"noticed": noticed - before, "answering": answered - before}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure replacements of nodes.")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    results: dict[str, list[dict[str, float]]] = {"power": [], "agent": []}
    # munged wants a folder of the cluster that everybody may enter, which its script sees to
    with tempfile.TemporaryDirectory(prefix="sl", dir="/tmp") as folder, tempfile.TemporaryDirectory() as work:
        cluster = Cluster(Path(folder))
        os.chdir(work)
        try:
            for _ in range(options.runs):
                results["agent"].append(replacement(cluster, "agent"))
                results["power"].append(replacement(cluster, "power"))
        finally:
            cluster.call("down")
    for name, runs in results.items():
        for key in runs[0]:
            values = [run[key] for run in runs]
            listed = ", ".join(f"{value:.2f}" for value in values)
            print(f"{name:12} {key:14} median {statistics.median(values):6.2f} s  ({listed})")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
