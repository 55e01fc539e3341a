"""What strangers cost a controller: calls of actors while another process holds thousands of connections at its port.

The flood comes from a process of another user, if this one may start such (root), and is one of several kinds: silent
connections, garbage, announcements of huge frames, HTTP, single bytes, ZeroMQ's greeting without what follows, and what
a client of torch's TCPStore says. The controller calls an actor of its own host and one whose agent has joined by TCP,
as those of other machines do: without a flood, with it, and without it again.

    python bench/flood.py [--connections 2000] [--seconds 8] [--modes idle,garbage,…] [--passes 3] [--json FILE]

A figure above 1 in the last three columns tells how many times longer a call took, or how many times fewer of them were
answered, than without the flood. On a machine that does other work, ``CPU`` says more: the milliseconds of CPU time
that the flood costs the controller while it does nothing else.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

from monarch_slurm.actor import Actor, endpoint, this_host
from monarch_slurm.controller import gather_hosts, publish, withdraw
from monarch_slurm.wire import read_invitation, write_invitation

OTHER_USER = 65534
IN_FLIGHT = 64
"""Calls on their way at a time, where throughput is measured."""

PAYLOADS = {
    "idle": b"",
    "garbage": os.urandom(4096),
    "huge": b"\xff" * 8 + b"\x7f" * 64,
    "http": b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999\r\n\r\n",
    "slow": b"\xff",
    "zmq": b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32),
    "tcpstore": b"\x00\x3c\x85\xf7\xce\x01" + b"\xff\xff\xff\xff\xff\xff\xff\x0f" * 2,
}

FLOOD = """
import os, resource, socket, sys
address, port, count, user, payload = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
if user:
    os.setgroups([]); os.setgid(user); os.setuid(user)
held = []
refused = 0
print("begins", flush=True)
for _ in range(count):
    one = socket.socket()
    one.settimeout(5)
    try:
        one.connect((address, port))
        one.setblocking(False)
        one.send(bytes.fromhex(payload))
        held.append(one)
    except OSError:
        refused += 1
print(len(held), flush=True)
sys.stdin.read()
open_still = 0
for one in held:
    try:
        while one.recv(65536):
            pass
    except BlockingIOError:
        open_still += 1
    except OSError:
        pass
print(open_still, flush=True)
"""


class Answerer(Actor):
    """Answers."""

    @endpoint
    def answer(self, number: int) -> int:
        """Return ``number``."""
        return number


def measure(actor: Any, seconds: float) -> dict[str, float]:
    """Return the median and mean seconds of a call, and the calls per second with many on their way; each is measured
    for half of ``seconds``."""
    times: list[float] = []
    end = time.monotonic() + seconds / 2
    while (began := time.monotonic()) < end or not times:
        actor.answer.call_one(1).get(60)
        times.append(time.monotonic() - began)
    done = 0
    began = time.monotonic()
    while time.monotonic() < began + seconds / 2 or not done:
        for future in [actor.answer.call_one(number) for number in range(IN_FLIGHT)]:
            future.get(60)
        done += IN_FLIGHT
    return {
        "median_s": statistics.median(times),
        "mean_s": statistics.fmean(times),
        "calls_per_s": done / (time.monotonic() - began),
    }


def cpu_of(mode: str, options: argparse.Namespace, ip: str, port: int) -> float:
    """Return the seconds of CPU time that a flood costs this process, beyond what it needs in that time anyhow."""
    began = time.process_time()
    time.sleep(options.seconds)
    idle = time.process_time() - began
    began = time.process_time()
    with Flood(ip, port, mode, options.connections):
        time.sleep(options.seconds)
    return max(0.0, time.process_time() - began - idle)


class Flood:
    """A process that holds connections; a context manager."""

    def __init__(self, address: str, port: int, mode: str, count: int) -> None:
        user = OTHER_USER if os.getuid() == 0 else 0
        arguments = [address, str(port), str(count), str(user), PAYLOADS[mode].hex()]
        command = [sys.executable, "-I", "-c", FLOOD, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/")
        self.connected = self.held = 0

    def __enter__(self) -> Flood:
        assert self._process.stdout is not None
        self._process.stdout.readline()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdout is not None
        self.connected = int(self._process.stdout.readline())
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.held = int(self._process.stdout.readline())
        self._process.wait()
        self._process.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--modes", default=",".join(PAYLOADS))
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder)
        publish(job, address="127.0.0.1")
        invitation = read_invitation(job / "controller.json")
        write_invitation(job, replace(invitation, near="", controller_host="another machine", controller_pid=0))
        command = [sys.executable, "-m", "monarch_slurm.host", "--folder", folder, "--name", "far"]
        agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        far_host = gather_hosts(["far"], timeout=120)
        actors: dict[str, Any] = {
            "own host": this_host().spawn_procs().spawn("near", Answerer),
            "by TCP": far_host.spawn_procs().spawn("far", Answerer),
        }
        ip, _, port = invitation.address.removeprefix("tcp://").rpartition(":")
        for actor in actors.values():
            measure(actor, min(1.0, options.seconds))
        print(
            f"{'mode':9} {'actor':9} {'median':>10} {'flooded':>10} {'held':>11} {'CPU':>8}  median  mean  throughput"
        )
        for mode in options.modes.split(","):
            cpu = cpu_of(mode, options, ip, int(port))
            for place, actor in actors.items():
                passes = []
                for _ in range(options.passes):
                    before = measure(actor, options.seconds / 2)
                    with Flood(ip, int(port), mode, options.connections) as flood:
                        during = measure(actor, options.seconds)
                    after = measure(actor, options.seconds / 2)
                    quiet = {name: (before[name] + after[name]) / 2 for name in before}
                    passes.append((quiet, during, flood.connected, flood.held))
                ratios = {name: statistics.median(d[name] / q[name] for q, d, *_ in passes) for name in passes[0][0]}
                ratios["calls_per_s"] = 1 / ratios["calls_per_s"]
                quiet, during, connected, held = passes[-1]
                results.append({
                    "mode": mode, "actor": place, "connected": connected, "held_at_the_end": held, "cpu_s": cpu,
                    "ratios": ratios, "passes": [{"quiet": q, "flooded": d} for q, d, *_ in passes],
                })  # fmt: skip
                print(
                    f"{mode:9} {place:9} {quiet['median_s'] * 1e6:7.0f} us {during['median_s'] * 1e6:7.0f} us "
                    f"{held:5}/{connected:<5} {cpu * 1e3:5.0f} ms {ratios['median_s']:6.2f} {ratios['mean_s']:6.2f} "
                    f"{ratios['calls_per_s']:6.2f}",
                    flush=True,
                )
        if options.json:
            options.json.write_text(json.dumps({"uid": os.getuid(), "results": results}, indent=1))
        far_host.shutdown().get(60)
        agent.wait(60)
        withdraw(job)


if __name__ == "__main__":
    main()
