"""Who is there: the hosts, procs and actors of this program at this moment, as plain values."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections import Counter
from typing import Any

from monarch_slurm.actor.client import client
from monarch_slurm.wire import AGENT, CONTROLLER, Address, Message, loads

ANSWER_SECONDS = 1.5
"""Time that agents, and then procs, have to answer; those that do not are called silent."""


def census(timeout: float = ANSWER_SECONDS) -> dict[str, Any]:
    """Ask all agents and procs what they are doing, and return it.

    Returns:
        A map with

        - ``controller``: ``host``, ``pid`` and ``started`` (seconds since the epoch)
        - ``hosts``: for each ``name``, ``id``, ``hostname``, ``address``, ``state`` (``up``, ``silent``, ``lost``),
          ``since`` (seconds since the epoch), ``starts`` (how many agents have joined under that name), ``cause`` of
          the loss, and ``procs``
        - in these ``name``, ``mesh``, ``rank``, ``pid``, ``state`` (``starting``, ``running``, ``stopping``,
          ``silent``), ``since`` and ``actors``
        - in these ``name``, ``class``, ``rank``, ``doing`` (the endpoint that it is in, or empty) and ``waiting``
          (messages in its queue)
        - ``failures``: the last procs that ended unexpectedly, with ``t``, ``host``, ``proc``, ``pid`` and ``exit``
    """
    here = client()
    with here.hosts_changed:
        joined, records = list(here.joined), list(here.records.values())
        failures = list(here.proc_failures)
    told_by_agents = _ask([Address(info.host, AGENT) for info in joined], timeout)
    procs = {
        Address(info.host, row["name"]): row
        for info in joined
        for row in told_by_agents.get(Address(info.host, AGENT), [])
    }
    told_by_procs = _ask([address for address, row in procs.items() if row["state"] == "running"], timeout)
    for address, row in procs.items():
        row["actors"] = told_by_procs.get(address, [])
        if row["state"] == "running" and address not in told_by_procs:
            row["state"] = "silent"
    starts = Counter(record.info.name for record in records)
    up = {info.host for info in joined}
    latest = {record.info.name: record for record in records}  # in the order of joining
    hosts = []
    for name, record in sorted(latest.items(), key=lambda item: _natural(item[0])):
        info, down = record.info, record.down
        state = "lost" if info.host not in up else "up" if Address(info.host, AGENT) in told_by_agents else "silent"
        hosts.append(
            {
                "name": name,
                "id": info.host,
                "hostname": info.hostname,
                "address": info.address,
                "state": state,
                "since": down.detected_at if down is not None else record.joined_at,
                "starts": starts[name],
                "cause": down.cause if down is not None else "",
                "procs": [row for address, row in procs.items() if address.host == info.host],
            }
        )
    return {
        "controller": {"host": socket.gethostname(), "pid": os.getpid(), "started": here.started_at},
        "hosts": hosts,
        "failures": [
            {"t": down.detected_at, "host": down.host_name, "proc": down.proc, "pid": down.pid, "exit": down.exit}
            for down in failures
        ],
    }


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts ``n2`` before ``n10``."""
    return [(int(part) if part.isdecimal() else 0, part) for part in re.split(r"([0-9]+)", name)]


def _ask(processes: list[Address], timeout: float) -> dict[Address, list[dict[str, Any]]]:
    """Return what each process says of itself; those that say nothing in time are left out."""
    runtime = client().runtime
    answers: dict[Address, list[dict[str, Any]]] = {}
    arrived = threading.Condition()
    open_ranks = set(range(len(processes)))

    def answered(rank: int, status: str, frames: Any) -> None:
        rows = loads(frames)
        with arrived:
            answers[processes[rank]] = rows
            open_ranks.discard(rank)
            arrived.notify_all()

    def lost(rank: int, reason: str) -> None:
        with arrived:
            open_ranks.discard(rank)
            arrived.notify_all()

    number = runtime.replies.expect({rank: (p, None) for rank, p in enumerate(processes)}, answered, lost)
    for rank, process in enumerate(processes):
        runtime.send(Message("describe", process, CONTROLLER, {"port": number, "rank": rank}))
    deadline = time.monotonic() + timeout
    with arrived:
        arrived.wait_for(lambda: not open_ranks, max(0.0, deadline - time.monotonic()))
    runtime.replies.forget(number)
    return dict(answers)
