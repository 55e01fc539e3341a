"""The stacks of all procs of one host, gathered on the agent's loop while it goes on with everything else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from monarch_slurm.host.stacks import ANSWER_SECONDS, StackDump
from monarch_slurm.wire import Address, Loop, Message, pack

_LOOK_SECONDS = 0.005
_DEAF = (
    "its I/O thread does not answer: one of its threads holds the GIL in C code that does not release it, or the "
    "process gets no CPU"
)


class StackDesk:
    """Answers ``stacks`` messages with the stacks of this host's procs.

    Args:
        agent: who answers.
        pids: returns names and pids of the procs.
        send: sends a message to a proc here or to whoever asked.
    """

    def __init__(
        self, loop: Loop, agent: Address, pids: Callable[[], Mapping[str, int]], send: Callable[[Message], None]
    ) -> None:
        self._loop = loop
        self._agent = agent
        self._pids = pids
        self._send = send
        self._open: set[_Gathering] = set()

    def ask(self, message: Message) -> None:
        """Begin to gather; the answer goes to the port in ``message.fields``."""
        gathering = _Gathering(self._pids(), self._loop.clock() + ANSWER_SECONDS)
        for name in gathering.silent:
            self._send(Message("ping", Address(self._agent.host, name), self._agent))
        self._open.add(gathering)
        self._look(gathering, message)

    def heard(self, message: Message) -> None:
        """A proc has answered ``ping``."""
        for gathering in self._open:
            gathering.silent.discard(message.src.proc)

    def _look(self, gathering: _Gathering, message: Message) -> None:
        if not gathering.poll() and self._loop.clock() < gathering.deadline:
            self._loop.call_later(_LOOK_SECONDS, lambda: self._look(gathering, message))
            return
        self._open.discard(gathering)
        self._send(Message("port", message.src, self._agent, message.fields, [pack(gathering.result())]))


class _Gathering:
    """One question to all procs."""

    def __init__(self, pids: Mapping[str, int], deadline: float) -> None:
        self.deadline = deadline
        self._dumps = {name: StackDump(pid) for name, pid in pids.items()}
        self.silent = {name for name, dump in self._dumps.items() if not dump.stacks.note}

    def poll(self) -> bool:
        return all(dump.poll() for dump in self._dumps.values()) and not self.silent

    def result(self) -> list[dict[str, Any]]:
        answer = []
        for name, dump in self._dumps.items():
            dump.give_up()
            if name in self.silent and not dump.stacks.note:
                dump.stacks.note = _DEAF
            answer.append({"proc": name, **dump.stacks.to_fields()})
        return answer
