"""How long training is held up by a failure, and how long until the failed replica is back.

For each kind of failure the same small model trains on three replicas of this machine while failures are injected; the
stages of every recovery are measured from the injection. With ``--peer`` the same is done with TorchFT alone: the same
engine in plain processes, the Lighthouse with the settings of its command line, a new process started at once for one
that was killed.

    python bench/recovery.py [--injections 10] [--kinds kill,hang] [--peer] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from monarch_slurm.config import configure
from monarch_slurm.controller import RestartLimit
from monarch_slurm.train.config import Place, TrainConfig
from monarch_slurm.train.events import Event, event
from monarch_slurm.train.injection import KINDS, parse_kinds, schedule
from monarch_slurm.train.manager import Run
from monarch_slurm.train.session import preload_modules
from monarch_slurm.train.supervisor import RestartPolicy
from monarch_slurm.train.timeline import failures

STEP_DEADLINE = 3.0
EVERY = {"kill": 4.0, "segfault": 4.0, "exception": 4.0, "hang": 6.5}
"""Seconds between two injections: long enough that the one before is over."""

STAGES = ("detected", "respawned", "joined", "state_received", "first_commit")
CONFIG = TrainConfig(model="tiny", replicas=3, tokens=10**9, step_deadline=STEP_DEADLINE)
PEER_HEARTBEAT_TIMEOUT, PEER_JOIN_TIMEOUT = 5.0, 60.0
"""Seconds; the defaults of TorchFT's ``torchft_lighthouse`` command."""


def measure(kind: str, injections: int, folder: Path) -> list[dict[str, Any]]:
    """Inject ``injections`` failures of ``kind`` into one run; return the timeline of each."""
    limit = RestartLimit(10_000, 1.0)
    planned = schedule(EVERY[kind], (kind,), CONFIG.replicas, 1, seed=0, first=2.0)
    syncs: dict[tuple[int, int], int] = {}

    def watch(item: Event) -> None:
        if item["kind"] == "detected":
            syncs.setdefault((item["replica"], item["generation"] + 1), 0)
        elif item["kind"] == "sync" and item["committed"] and (item["replica"], item["generation"]) in syncs:
            syncs[item["replica"], item["generation"]] += 1
            # The second sync: by then the hashes of the transferred state have been told, too.
            recovered = sum(count >= 2 for count in syncs.values())
            if recovered >= injections:
                run.stop(f"{injections} failures recovered")

    folder.mkdir()
    run = Run(CONFIG, folder, None, RestartPolicy(mesh=limit, hosts=limit, backoff=0.0), planned, watch)
    found = failures(run.run())
    recovered = [failure for failure in found if failure.outcome == "recovered"][:injections]
    # On a busy machine a replica fails again before it has recovered. That must be said: it makes the figures too good.
    others = sum(failure.outcome != "recovered" for failure in found)
    if others:
        print(f"{kind}: {others} of {len(found)} failures are not counted, as another came before the recovery")
    return [failure.to_dict() for failure in recovered]


class Peer:
    """TorchFT alone: trainers as plain processes, started again by the next line of a script."""

    def __init__(self, config: TrainConfig) -> None:
        from monarch_slurm.train.fault_tolerance import start_lighthouse

        self.config = config
        self.events: list[Event] = []
        self._server, self._lighthouse = start_lighthouse("127.0.0.1", config)
        self._processes = {replica: self._start(replica, 0) for replica in range(config.replicas)}
        self._generation = dict.fromkeys(self._processes, 0)

    def _start(self, replica: int, generation: int) -> subprocess.Popen[str]:
        arguments = [json.dumps(self.config.to_dict()), str(replica), str(generation), self._lighthouse]
        command = [sys.executable, os.path.abspath(__file__), "--trainer", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        return process

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                self.events.append(json.loads(line))

    def kill(self, failure: int, replica: int) -> None:
        """Kill a trainer and start another as soon as it is gone."""
        old = self._generation[replica]
        fields = {"replica": replica, "generation": old, "rank": 0, "failure": failure}
        self.events.append(event("injected", type="kill", **fields))
        process = self._processes[replica]
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.events.append(event("detected", cause="killed", exit="Killed(sig=9)", **fields))
        self._generation[replica] = old + 1
        self._processes[replica] = self._start(replica, old + 1)

    def committed(self, replica: int) -> bool:
        """Whether the trainer that runs now has committed a sync."""
        generation = self._generation[replica]
        return any(
            item["kind"] == "sync"
            and item["committed"]
            and (item["replica"], item["generation"]) == (replica, generation)
            for item in list(self.events)
        )

    def close(self) -> None:
        """End everything."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._server.shutdown()


def measure_peer(injections: int) -> list[dict[str, Any]]:
    """Do the same as `measure` for kills with TorchFT alone."""
    config = replace(CONFIG, heartbeat_timeout=PEER_HEARTBEAT_TIMEOUT, join_timeout=PEER_JOIN_TIMEOUT)
    peer = Peer(config)
    try:
        for number in range(injections):
            _until(lambda: all(peer.committed(replica) for replica in range(config.replicas)))
            time.sleep(EVERY["kill"] / 2 * (1 + number / injections))  # another place in the interval each time
            peer.kill(number + 1, number % config.replicas)
        _until(lambda: all(peer.committed(replica) for replica in range(config.replicas)))
    finally:
        peer.close()
    return [failure.to_dict() for failure in failures(peer.events)]


def _until(reached: Any, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            raise TimeoutError("the peer's trainers did not come back")
        time.sleep(0.02)


def run_trainer(config: str, replica: str, generation: str, lighthouse: str) -> None:
    """Be one trainer of the peer; events go to stdout."""
    began = time.time()
    from monarch_slurm.train.engine import LlamaEngine

    def emit(item: Event) -> None:
        if item["kind"] == "trainer_started":
            item["t"] = began
        print(json.dumps(item), flush=True)

    place = Place(int(replica), 0, 1, int(generation), lighthouse)
    LlamaEngine(TrainConfig(**json.loads(config)), place, emit).run()


def summarize(timelines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return median and worst of every stage and stall, and what was lost."""
    figures: dict[str, list[float]] = {stage: [] for stage in (*STAGES, "stall_longest", "stall_attributable")}
    for timeline in timelines:
        for stage in STAGES:
            figures[stage].append(timeline["seconds"].get(stage))
        figures["stall_longest"].append(timeline["stall_longest"])
        figures["stall_attributable"].append(timeline["stall_attributable"])
    summary: dict[str, Any] = {"injections": len(timelines)}
    for name, values in figures.items():
        known = [value for value in values if value is not None and math.isfinite(value)]
        summary[name] = {
            "median": statistics.median(known) if known else None,
            "worst": max(known, default=None),
            "count": len(known),
        }
    summary["syncs_lost"] = sum(timeline["syncs_lost"] for timeline in timelines)
    summary["states_equal"] = sum(timeline["state_equal"] is True for timeline in timelines)
    return summary


def show(results: dict[str, dict[str, Any]], console: Console) -> None:
    """Print the results as a table: median / worst, in seconds since the injection."""
    table = Table(title="seconds: median / worst")
    table.add_column("failure")
    table.add_column("n", justify="right")
    for name in (*STAGES, "stall, longest", "stall, attributable", "syncs lost", "states equal"):
        table.add_column(name.replace("_", " "), justify="right")
    for kind, summary in results.items():
        cells = [_cell(summary[name]) for name in (*STAGES, "stall_longest", "stall_attributable")]
        table.add_row(
            kind, str(summary["injections"]), *cells, str(summary["syncs_lost"]), str(summary["states_equal"])
        )
    console.print(table)


def _cell(figure: dict[str, Any]) -> str:
    return "-" if figure["median"] is None else f"{figure['median']:.2f} / {figure['worst']:.2f}"


def main() -> None:
    """Run the benchmark that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--injections", type=int, default=10, help="failures of each kind")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--peer", action="store_true", help="measure TorchFT alone, too")
    parser.add_argument("--json", type=Path, help="write the figures and all timelines there")
    parser.add_argument("--trainer", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainer:
        run_trainer(*options.trainer)
        return
    configure(preload=preload_modules(CONFIG))
    timelines: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="recovery-") as scratch:
        configure(log_dir=str(Path(scratch, "logs")))
        for kind in parse_kinds(options.kinds):
            timelines[kind] = measure(kind, options.injections, Path(scratch, kind))
    if options.peer:
        timelines["kill, TorchFT alone"] = measure_peer(options.injections)
    results = {kind: summarize(found) for kind, found in timelines.items()}
    show(results, Console(width=max(150, Console().width)))
    if options.json:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()}
        options.json.write_text(json.dumps({"machine": machine, "results": results, "timelines": timelines}, indent=1))


if __name__ == "__main__":
    main()
