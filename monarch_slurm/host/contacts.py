"""Who has to do with whom, as far as the controller passes it on: they are told of each other's end, and nobody else.

A process can only wait for another, own it or be owned by it after a message between the two. If one is asked later,
the agent that it was on answers with the news of its end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from monarch_slurm.wire import AGENT, CONTROLLER, Message


class Contacts:
    """The contacts of one job. The caller holds a lock.

    The controller's own processes are no contacts: they are told everything.
    """

    def __init__(self) -> None:
        self._hosts: defaultdict[str, set[str]] = defaultdict(set)
        """By host, proc or proc mesh: the hosts that it has had to do with."""
        self._keepers: set[str] = set()
        """Procs that start others again, and their hosts: many may wait for them that they never heard of."""

    def note(self, message: Message) -> None:
        """Note a message of one host to another."""
        source, target, fields = message.src, message.dst, message.fields
        if source.host == CONTROLLER.host or target.host == CONTROLLER.host:
            return
        if message.kind == "spawn" and fields["restartable"]:
            self._keepers.update((source.host, source.proc))
        whom = target.proc if target.proc != AGENT else str(fields.get("proc_mesh") or fields.get("mesh", ""))
        self._meet(source.host, source.proc, target.host, whom)

    def note_cast(self, message: Message, hosts: Iterable[str]) -> None:
        """Note a message of a host to the procs of a mesh on many hosts."""
        source, fields = message.src, message.fields
        if source.host != CONTROLLER.host:
            if "each" in fields and fields["restartable"]:
                self._keepers.update((source.host, source.proc))
            for host in hosts:
                self._meet(source.host, source.proc, host, fields["proc_mesh"])

    def of_proc(self, down: dict[str, Any], hosts: Iterable[str]) -> set[str]:
        """Return those of ``hosts`` that are told of the end of a proc, which the fields ``down`` tell."""
        if down["proc"] in self._keepers:
            return set(hosts)
        return (self._known(down["proc"]) | self._known(down["mesh"])).intersection(hosts)

    def of_host(self, host: str, hosts: Iterable[str]) -> set[str]:
        """Return those of ``hosts`` that are told of the end of ``host``; its contacts are forgotten."""
        if host in self._keepers:
            return set(hosts)
        told = self._known(host).intersection(hosts)
        self._hosts.pop(host, None)
        return told

    def _meet(self, host: str, proc: str, other: str, whom: str) -> None:
        self._hosts[host].add(other)
        self._hosts[other].add(host)
        self._hosts[proc].add(other)
        self._hosts[whom].add(host)

    def _known(self, key: str) -> set[str]:
        return self._hosts.get(key, set())
