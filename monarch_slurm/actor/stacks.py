"""The stacks of all ranks of this program, for whoever asks at its console."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from monarch_slurm.actor.replies import CountDown
from monarch_slurm.actor.runtime import Runtime
from monarch_slurm.host import HostInfo
from monarch_slurm.host.stacks import ANSWER_SECONDS
from monarch_slurm.wire import AGENT, Address, Message, unpack
from monarch_slurm.wire.large_buffers import Buffer

_HOST_SECONDS = ANSWER_SECONDS + 3.0
"""What the agents get to answer in all."""


def gather_stacks(runtime: Runtime, hosts: Sequence[HostInfo]) -> dict[str, Any]:
    """Return the stacks of every proc, and why there are none of some hosts. Waits; not for the I/O thread.

    Returns:
        ``{"procs": [{"host", "proc", "pid", "threads", "note"}, ...], "silent": {host name: why}}``.
    """
    procs: list[dict[str, Any]] = []
    silent = {info.host: f"its agent has not answered within {_HOST_SECONDS:g} s" for info in hosts}
    names = {info.host: info.name for info in hosts}
    all_there = threading.Event()
    one_there = CountDown(len(hosts), all_there.set)

    def arrived(index: int, status: str, frames: Sequence[Buffer]) -> None:
        info = hosts[index]
        procs.extend({"host": info.name, **proc} for proc in unpack(frames[0]))
        silent.pop(info.host, None)
        one_there()

    def lost(index: int, reason: str) -> None:
        silent[hosts[index].host] = reason
        one_there()

    agents = [Address(info.host, AGENT) for info in hosts]
    number = runtime.replies.expect({i: (agent, None) for i, agent in enumerate(agents)}, arrived, lost)
    for index, agent in enumerate(agents):
        fields = {"port": number, "rank": index, "status": "value"}
        runtime.send(Message("stacks", agent, runtime.address, fields))
    all_there.wait(_HOST_SECONDS)
    return {"procs": list(procs), "silent": {names[host]: why for host, why in silent.items()}}
