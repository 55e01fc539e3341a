"""What a controller tells of its hosts, procs and actors when it is asked from outside."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from job_agents import Agent
from support import DEADLINE, hold, wait_until

from monarch_slurm.actor import Actor, MeshFailure, endpoint
from monarch_slurm.controller import census, gather_hosts, publish, withdraw
from monarch_slurm.wire import ask


class Sleeper(Actor):
    @endpoint
    def wait_for(self, path: str) -> None:
        while not Path(path).exists():
            threading.Event().wait(0.01)

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Awaits(Actor):
    @endpoint
    async def nothing(self) -> None:
        return None


def test_hosts_procs_and_actors_are_told_while_they_work(
    tmp_path: Path, agents: Callable[..., Agent], failures: list[MeshFailure]
) -> None:
    folder = tmp_path / "job"
    publish(folder, address="127.0.0.1")
    agents(folder, "first"), agents(folder, "second")
    hosts = gather_hosts(["first", "second"], timeout=DEADLINE)
    procs = hosts.spawn_procs({"gpus": 2}, name="trainers")
    sleepers: Any = procs.spawn("sleeper", Sleeper)
    awaits: Any = procs.spawn("awaits", Awaits)
    awaits.nothing.call().get(DEADLINE)
    pids = list(sleepers.pid.call().get(DEADLINE).values())
    sleepers.wait_for.call(str(tmp_path / "go"))
    sleepers.pid.call()

    def busy() -> dict[str, Any] | None:
        seen = ask(folder, "census", DEADLINE)
        actors = [a for h in seen["hosts"] for p in h["procs"] for a in p["actors"] if a["name"] == "sleeper"]
        # A proc that has not answered in time is in a census without its actors.
        return (
            seen if len(actors) == 4 and all(a["doing"] == "wait_for" and a["waiting"] == 1 for a in actors) else None
        )

    seen = wait_until(busy)
    assert seen["controller"]["pid"] == os.getpid()
    both = [host for host in seen["hosts"] if host["name"] in ("first", "second")]
    assert [(host["name"], host["state"], host["starts"]) for host in both] == [("first", "up", 1), ("second", "up", 1)]
    rows = sorted((proc for host in both for proc in host["procs"]), key=lambda proc: proc["rank"])
    assert [row["pid"] for row in rows] == pids
    assert {row["state"] for row in rows} == {"running"}
    assert [actor["rank"] for row in rows for actor in row["actors"] if actor["name"] == "sleeper"] == [0, 1, 2, 3]
    classes = {actor["class"].rpartition(".")[2] for row in rows for actor in row["actors"]}
    assert classes == {"Sleeper", "Awaits"}
    (tmp_path / "go").touch()
    withdraw(folder)
    procs.stop().get(DEADLINE)


def test_a_stopped_proc_is_silent_a_killed_one_a_failure_and_a_dead_agent_a_lost_host(
    tmp_path: Path, agents: Callable[..., Agent], failures: list[MeshFailure]
) -> None:
    folder = tmp_path / "job"
    publish(folder, address="127.0.0.1")
    first = agents(folder, "lonely")
    procs = gather_hosts(["lonely"], timeout=DEADLINE).spawn_procs({"gpus": 2}, name="p")
    sleepers: Any = procs.spawn("sleeper", Sleeper)
    stopped, killed = list(sleepers.pid.call().get(DEADLINE).values())

    def host() -> dict[str, Any]:
        return next(host for host in census(0.3)["hosts"] if host["name"] == "lonely")

    hold(stopped)
    assert [proc["state"] for proc in host()["procs"]] == ["silent", "running"]
    os.kill(stopped, signal.SIGCONT)
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: any(f["pid"] == killed and f["exit"] == "Killed(sig=9)" for f in census(0.3)["failures"]))
    assert [proc["pid"] for proc in host()["procs"]] == [stopped]
    first.process.kill()
    wait_until(lambda: host()["state"] == "lost")
    assert host()["cause"]
    agents(folder, "lonely")
    gather_hosts(["lonely"], timeout=DEADLINE)
    assert (host()["state"], host()["starts"], host()["procs"]) == ("up", 2, [])
