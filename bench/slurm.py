"""How long a job takes from submission to the first answer of an actor, beyond what Slurm itself takes.

    python bench/slurm.py --nodes 4                # on the cluster at hand
    python bench/slurm.py --nodes 4 --test-cluster # on a cluster of its own, four nodes on this machine (root)

Each run submits a plain batch script that prints the time, which is Slurm's own latency, and then a job whose program
waits for its hosts, spawns a proc on each and calls an actor there. Seconds since `apply` was called.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from slurm_cluster import cluster

from monarch_slurm.job import SlurmJob

PROGRAM = """
import json, sys, time
times = {"program": time.time()}
from monarch_slurm.actor import Actor, endpoint
from monarch_slurm.job import job_load

class Hello(Actor):
    @endpoint
    def hello(self):
        return 1

times["imported"] = time.time()
hosts = job_load().state().hosts
times["joined"] = time.time()
hello = hosts.spawn_procs().spawn("hello", Hello)
assert sum(hello.hello.call().get().values()) == len(hosts)
times["answered"] = time.time()
print(json.dumps(times), flush=True)
"""

STAGES = ("submitted", "program", "imported", "joined", "answered")


def plain_latency(nodes: int, folder: Path, options: list[str]) -> float:
    """Return the seconds from sbatch to the first line of a batch script."""
    log = folder / f"plain-{time.time_ns()}.log"
    began = time.time()
    command = ["sbatch", "--wait", f"--nodes={nodes}", "--exclusive", f"--output={log}", *options, "--wrap"]
    subprocess.run([*command, "date +%s.%N"], check=True, stdout=subprocess.DEVNULL)
    return float(log.read_text()) - began


def job_times(nodes: int, folder: Path, options: list[str]) -> dict[str, float]:
    """Return the seconds from the call of `apply` to each of `STAGES`."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    job = SlurmJob({"hosts": nodes}, log_dir=str(folder), slurm_args=options)
    began = time.time()
    job.apply([sys.executable, str(program)])
    submitted = time.time()
    with (folder / "out").open("w+") as out:
        code = job.follow(out)
        out.seek(0)
        said = out.read()
    if code != 0:
        raise SystemExit(said)
    times = {"submitted": submitted, **json.loads(said.splitlines()[-1])}
    return {stage: times[stage] - began for stage in STAGES}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--test-cluster", action="store_true", help="start a cluster on this machine for it")
    parser.add_argument("--slurm-arg", action="append", default=[], help="option for sbatch, such as --partition=debug")
    options = parser.parse_args()
    with cluster(options.nodes) if options.test_cluster else nullcontext():
        folder = Path(tempfile.mkdtemp(prefix="bench-slurm-", dir="." if not options.test_cluster else None))
        plain, found = [], []
        for _ in range(options.runs):
            plain.append(plain_latency(options.nodes, folder, options.slurm_arg))
            found.append(job_times(options.nodes, folder, options.slurm_arg))
    print(f"{options.nodes} nodes, {options.runs} runs; seconds since apply(), median (each run)")
    print(f"{'plain sbatch, script runs':28} {statistics.median(plain):6.2f}  {_each(plain)}")
    for stage in STAGES:
        times = [one[stage] for one in found]
        print(f"{stage:28} {statistics.median(times):6.2f}  {_each(times)}")
    beyond = [one["answered"] - base for one, base in zip(found, plain, strict=True)]
    print(f"{'answered, beyond Slurm':28} {statistics.median(beyond):6.2f}  {_each(beyond)}")


def _each(times: list[float]) -> str:
    return "(" + ", ".join(f"{value:.2f}" for value in times) + ")"


if __name__ == "__main__":
    main()
