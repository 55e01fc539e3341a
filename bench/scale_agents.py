"""Many host agents in one process, with procs that are only pretended: for ``bench/scale.py``.

    python bench/scale_agents.py FOLDER FIRST COUNT

Each agent has a socket, a key and numbered messages of its own, as a real one has, and answers for its procs: a spawned
proc reports at once, an actor's endpoints return their first argument. Lines on stdin command it: ``die N`` closes
the sockets of N agents, as the kernel does for a process that is killed; ``mute N`` leaves them open and silent, as
a cut network does.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import zmq

from monarch_slurm.actor.messages import Call, ref_from_fields
from monarch_slurm.actor.replies import VALUE
from monarch_slurm.config import configure, settings
from monarch_slurm.host.branch import Branch
from monarch_slurm.host.exits import ProcDown
from monarch_slurm.host.identity import new_host_id
from monarch_slurm.wire import (
    AGENT,
    CONTROLLER,
    Address,
    Invitation,
    Link,
    Loop,
    Message,
    dumps,
    loads,
    read_invitation,
)
from monarch_slurm.wire.limits import make_context
from monarch_slurm.wire.sockets import connect_tcp, make_dealer


class SimulatedAgent:
    """One agent and its procs."""

    def __init__(self, loop: Loop, context: zmq.Context[zmq.Socket[bytes]], invitation: Invitation, name: str) -> None:
        self.name = name
        self.host = new_host_id(name)
        self._address = Address(self.host, AGENT)
        self._loop = loop
        self.mute = False
        dealer = make_dealer(context, self.host)
        connect_tcp(dealer, invitation)
        self._up = Link(loop, dealer, lambda _, message: self._from_controller(message), self._fault)
        self._branch = Branch(loop, context, self.host, "127.0.0.1", invitation, self._take, self._up.send)
        hello = {"name": name, "pid": os.getpid(), "hostname": name, "address": "127.0.0.1"}
        self._up.send(Message("hello", CONTROLLER, self._address, hello))
        interval = settings().heartbeat_interval
        loop.call_later(random.uniform(0, interval), self._beat)

    def die(self) -> None:
        """Vanish as a killed process does."""
        self.mute = True
        self._up.close()
        self._branch.close()

    def _beat(self) -> None:
        if not self.mute:
            self._up.send(self._branch.heartbeat())
            self._loop.call_later(settings().heartbeat_interval, self._beat)

    def _fault(self, peer: str, error: Exception) -> None:
        print(f"{self.name}: {error}", file=sys.stderr)
        self.die()

    def _from_controller(self, message: Message) -> None:
        if not self.mute:
            self._branch.from_controller(message)

    def _take(self, message: Message) -> None:
        fields = message.fields
        if message.kind == "spawn":
            for rank in fields["ranks"]:
                self._answer(f"{fields['mesh']}.{rank}", fields["start"]["ready"], rank, True)
        elif message.kind == "cast":
            self._cast(message)
        elif message.kind == "stop":
            for rank in fields["ranks"]:
                name = f"{fields['mesh']}.{rank}"
                down = ProcDown(self.host, self.name, name, fields["mesh"], rank, 1, "Exited(code=0)", 0.0, [], True)
                self._branch.send(Message("proc_down", CONTROLLER, self._address, down.to_fields()))
        elif message.kind == "welcome":
            configure(**fields["settings"])
        elif message.kind == "shutdown":
            self._branch.send(Message("bye", CONTROLLER, self._address))
            self.mute = True

    def _cast(self, message: Message) -> None:
        fields = message.fields
        if fields["op"] == "call" and fields["port"] is not None:
            call = Call(message)
            (value, *_), _ = loads(call.body)
            for rank in fields["base_ranks"]:
                self._answer(f"{fields['proc_mesh']}.{rank}", fields["port"], call.place(rank).rank, value)
        elif fields["op"] == "spawn":
            ref = ref_from_fields(fields["ref"])
            for rank in fields["base_ranks"]:
                self._answer(f"{fields['proc_mesh']}.{rank}", fields["ready"], ref.rank_of(rank), True)

    def _answer(self, proc: str, port: Any, rank: int, value: Any) -> None:
        host, process, number = port
        fields = {"port": number, "rank": rank, "status": VALUE}
        self._branch.send(Message("port", Address(host, process), Address(self.host, proc), fields, dumps(value)))


def main() -> None:
    """Serve until stdin ends."""
    folder, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    invitation = read_invitation(folder / "controller.json")
    loop = Loop()
    context = make_context(sockets=8 * count + 64)
    agents = [SimulatedAgent(loop, context, invitation, f"n{first + i}") for i in range(count)]
    alive = list(agents)

    def command() -> None:
        line = os.read(0, 1024).decode()
        if not line:
            loop.stop()
            return
        what, number = line.split()
        for _ in range(int(number)):
            agent = alive.pop(random.randrange(len(alive)))
            if what == "die":
                agent.die()
            else:
                agent.mute = True

    loop.add_reader(0, command)
    loop.run()
    os._exit(0)  # thousands of sockets take long to close in order


if __name__ == "__main__":
    main()
