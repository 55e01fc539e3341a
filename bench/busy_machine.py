"""What a job loses on a machine that is overloaded, while its processes are stopped at random: it must be nothing.

Endless loops keep the machine at ``--load``. Agents, procs and the controller are stopped (SIGSTOP) one after the other
at random moments, each for ``--stop-seconds``, while the controller calls all procs. One more proc of each host is sent
large arguments, one at a time. There are three hosts: the controller's own, one whose agent joins from a job folder on
this machine, and one whose agent joins by TCP, as those of other machines do.

    python bench/busy_machine.py [--seconds 3600] [--load 50] [--large-mb 800] [--json FILE]

Exit code 0: no host and no proc was lost, and every call was answered.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

import monarch_slurm.actor as actor
from monarch_slurm.actor import Actor, MeshFailure, endpoint, this_host
from monarch_slurm.actor.client import client
from monarch_slurm.config import configure
from monarch_slurm.controller import gather_hosts, publish, withdraw
from monarch_slurm.wire import read_invitation, write_invitation

PROCS_PER_HOST = 2
MB = 1_000_000
START_SECONDS = 600.0
"""A machine at this load may take long to start processes."""

BURNER = "while True: pass"


class Eater(Actor):
    """Counts bytes."""

    @endpoint
    def eat(self, data: bytes) -> int:
        """Return the number of bytes of ``data``."""
        return len(data)

    @endpoint
    def pid(self) -> int:
        """Return the process id."""
        return os.getpid()


@dataclass
class Counts:
    """What the run ends with."""

    seconds: float = 0.0
    load: int = 0
    calls: int = 0
    large_calls: int = 0
    stops: dict[str, int] = field(default_factory=lambda: {"agent": 0, "controller": 0, "proc": 0})
    slowest_call_seconds: float = 0.0
    slowest_large_call_seconds: float = 0.0
    hosts_lost: int = 0
    failures: list[str] = field(default_factory=list)

    def is_good(self) -> bool:
        """Return whether nothing was lost."""
        return self.calls > 0 and not self.hosts_lost and not self.failures


def stop_at_random(targets: list[tuple[str, int]], seconds: float, pause: float) -> None:
    """Stop one of ``targets`` (kind and pid) after the other, each for ``seconds``; say which. Runs until killed.

    Args:
        pause: seconds between two stops, on average.
    """
    choose = random.Random(0)
    print("ready", flush=True)
    while os.getppid() == targets[0][1]:  # the controller comes first, and is the parent
        time.sleep(choose.uniform(0.0, 2 * pause))
        kind, pid = choose.choice(targets)
        try:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue  # what has ended is reported as lost
        print(kind, flush=True)


class Stopper:
    """A process that stops others, this one included."""

    def __init__(self, targets: list[tuple[str, int]], seconds: float, pause: float) -> None:
        self._pids = [pid for _, pid in targets]
        command = [sys.executable, __file__, "--stop", json.dumps([targets, seconds, pause])]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def end(self) -> list[str]:
        """Return the kinds of processes that were stopped, one for each stop."""
        self._process.kill()
        said, _ = self._process.communicate()
        for pid in self._pids:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue
        return said.split()


def start_agents(folder: Path) -> list[subprocess.Popen[bytes]]:
    """Start the agents of the hosts ``near`` and ``far``, which join the job in ``folder``."""
    publish(folder, address="127.0.0.1")
    invitation = read_invitation(folder / "controller.json")
    agents = []
    for name in ("near", "far"):
        if name == "far":  # joins by TCP and knows no pid of the controller, as if it were another machine
            far = replace(invitation, near="", controller_host="another machine", controller_pid=0)
            write_invitation(folder, far)
        command = [sys.executable, "-m", "monarch_slurm.host", "--folder", str(folder), "--name", name]
        agents.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        gather_hosts([name], timeout=START_SECONDS)
    return agents


def call_until(end: float, meshes: list[Any], counts: Counts) -> None:
    """Call all of ``meshes`` until the monotonic time ``end``."""
    while time.monotonic() < end and not counts.failures:
        began = time.monotonic()
        for future in [mesh.eat.call(b"1234") for mesh in meshes]:
            assert set(future.get().values()) == {4}
            counts.calls += 1
        counts.slowest_call_seconds = max(counts.slowest_call_seconds, time.monotonic() - began)


def send_large_until(end: float, meshes: list[Any], large: bytes, counts: Counts) -> None:
    """Send ``large`` to one after the other of ``meshes``, until the monotonic time ``end``; at least once."""
    for mesh in itertools.cycle(meshes):
        began = time.monotonic()
        try:
            assert mesh.eat.call_one(large).get() == len(large)
        except actor.SupervisionError as error:
            counts.failures.append(str(error).splitlines()[0])
        counts.large_calls += 1
        counts.slowest_large_call_seconds = max(counts.slowest_large_call_seconds, time.monotonic() - began)
        if time.monotonic() > end or counts.failures:
            return


def run(seconds: float, load: int, large_mb: int, stop_seconds: float, pause: float, folder: Path) -> Counts:
    """Run for ``seconds``, and return what happened."""
    counts = Counts(seconds, load)
    lock = threading.Lock()

    def note(failure: MeshFailure) -> None:
        with lock:
            counts.failures.append(failure.report().splitlines()[0])

    actor.unhandled_fault_hook = note
    configure(host_join_timeout=START_SECONDS, proc_start_timeout=START_SECONDS)
    agents = start_agents(folder)
    hosts = [this_host(), *(gather_hosts([name], timeout=START_SECONDS) for name in ("near", "far"))]
    meshes = [one.spawn_procs(per_host={"procs": PROCS_PER_HOST}).spawn("eaters", Eater) for one in hosts]
    eaters_of_large = [one.spawn_procs().spawn("large", Eater) for one in hosts]
    procs = [pid for mesh in meshes + eaters_of_large for pid in mesh.pid.call().get(START_SECONDS).values()]
    agent_pids = [info.pid for info in client().hub.hosts.values()]
    targets = [("controller", os.getpid())] * len(agent_pids)
    targets += [("agent", pid) for pid in agent_pids] + [("proc", pid) for pid in procs]
    stopper = Stopper(targets, stop_seconds, pause)
    burners = [subprocess.Popen([sys.executable, "-c", BURNER]) for _ in range(load)]
    end = time.monotonic() + seconds
    sender = threading.Thread(
        target=send_large_until, args=(end, eaters_of_large, bytes(large_mb * MB), counts), name="large"
    )
    try:
        sender.start()
        call_until(end, meshes, counts)
    except actor.SupervisionError as error:
        counts.failures.append(str(error).splitlines()[0])
    finally:
        sender.join()
        for kind in stopper.end():
            counts.stops[kind] += 1
        for burner in burners:
            burner.kill()
    counts.hosts_lost = len(agent_pids) - len(client().hub.hosts)
    withdraw(folder)
    for one in hosts[1:]:
        one.shutdown().get(START_SECONDS)
    for agent in agents:
        agent.wait(START_SECONDS)
    return counts


def main() -> int:
    """Parse the command line, run, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long to call (default: %(default)s)")
    parser.add_argument("--load", type=int, default=50, help="endless loops beside it (default: %(default)s)")
    parser.add_argument("--large-mb", type=int, default=800, help="size of a large argument (default: %(default)s)")
    parser.add_argument("--stop-seconds", type=float, default=2.5, help="length of a stop (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=5.0, help="mean seconds between stops (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the counts")
    parser.add_argument("--stop", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stop is not None:
        stop_at_random(*json.loads(options.stop))
        return 0
    with tempfile.TemporaryDirectory(prefix="busy-") as folder:
        counts = run(
            options.seconds, options.load, options.large_mb, options.stop_seconds, options.pause, Path(folder) / "job"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(counts.__dict__, indent=2))
    stops = ", ".join(f"{kind} {number}" for kind, number in counts.stops.items())
    gigabytes = psutil.virtual_memory().total / 1e9
    print(f"{options.seconds:g} s at load {options.load} on {os.cpu_count()} cores, {gigabytes:.0f} GB")
    print(f"calls of all procs of a host: {counts.calls}, with {options.large_mb} MB: {counts.large_calls}")
    print(f"stops of {options.stop_seconds:g} s: {stops}")
    print(f"slowest call: {counts.slowest_call_seconds:.2f} s, large: {counts.slowest_large_call_seconds:.2f} s")
    print(f"hosts lost: {counts.hosts_lost}; failures: {len(counts.failures)}")
    for failure in counts.failures:
        print(f"  {failure}")
    return 0 if counts.is_good() else 1


if __name__ == "__main__":
    sys.exit(main())
