"""The tree of host agents that casts go down: which host is under which. No I/O.

Hosts have slots in the order of joining; a new host takes the lowest slot that is free. With a fan-out of ``f`` the
first ``f`` slots are under the controller, and under the slot ``s`` are ``f * (s + 1)`` to ``f * (s + 2) - 1``. A host
is *linked* while its parent's agent reaches it; one that is not linked is under the controller, which has a connection
to every host.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass


def patience(missed_heartbeats: int) -> int:
    """Return after how many heartbeats that is late which has gone through others and has not been acknowledged.

    As many as a host may be silent until it is lost, and one that brings the acknowledgement.
    """
    return missed_heartbeats + 1


@dataclass
class _Node:
    slot: int
    linked: bool = False


class CastTree:
    """The tree of one job.

    Args:
        fanout: hosts under one.
    """

    def __init__(self, fanout: int) -> None:
        self.fanout = fanout
        self.version = 0
        """Changes whenever the way to a host does."""
        self._nodes: dict[str, _Node] = {}
        self._hosts: dict[int, str] = {}
        self._free: list[int] = []

    def __contains__(self, host: str) -> bool:
        return host in self._nodes

    def join(self, host: str) -> list[tuple[str, str]]:
        """Give ``host`` a slot; return the pairs of parent and child that are to link now."""
        slot = heapq.heappop(self._free) if self._free else len(self._nodes)
        self._nodes[host] = _Node(slot)
        self._hosts[slot] = host
        self.version += 1
        parent = self.parent(host)
        pairs = [(parent, host)] if parent is not None else []
        return pairs + [(host, child) for child in self._children(slot)]

    def leave(self, host: str) -> list[str]:
        """Take the slot of ``host`` back; return its children that were linked, which are under the controller now."""
        node = self._nodes.pop(host, None)
        if node is None:
            return []
        del self._hosts[node.slot]
        heapq.heappush(self._free, node.slot)
        self.version += 1
        return [child for child in self._children(node.slot) if self.cut(child)]

    def link(self, host: str, parent: str) -> bool:
        """Note that ``parent`` reaches ``host``; False if that is not its parent (any more)."""
        if host not in self._nodes or self.parent(host) != parent:
            return False
        self._nodes[host].linked = True
        self.version += 1
        return True

    def cut(self, host: str) -> bool:
        """Put ``host``, with all below it, under the controller; False if it was there already."""
        node = self._nodes.get(host)
        if node is None or not node.linked:
            return False
        node.linked = False
        self.version += 1
        return True

    def slot(self, host: str) -> int:
        """Return the slot of ``host``."""
        return self._nodes[host].slot

    def host(self, slot: int) -> str | None:
        """Return who has a slot."""
        return self._hosts.get(slot)

    def linked(self, host: str) -> bool:
        """Return whether ``host`` is reached through its parent."""
        node = self._nodes.get(host)
        return node is not None and node.linked

    def unlinked(self) -> list[str]:
        """Return the hosts that are under the controller although there is a host above them."""
        return [host for host, node in self._nodes.items() if not node.linked and self.parent(host) is not None]

    def parent(self, host: str) -> str | None:
        """Return the host that has the slot above, linked or not."""
        return self._hosts.get(parent_slot(self._nodes[host].slot, self.fanout))

    def way(self, host: str) -> list[str]:
        """Return the hosts that what is for ``host`` goes through, from itself up to one under the controller."""
        found = [host]
        while self.linked(found[-1]):
            parent = self.parent(found[-1])
            assert parent is not None, "a host whose parent left is not linked"
            found.append(parent)
        return found

    def through(self, host: str) -> list[str]:
        """Return the hosts that are reached through ``host``, itself first."""
        found = [host]
        for other in found:
            found += [child for child in self._children(self._nodes[other].slot) if self._nodes[child].linked]
        return found

    def by_top(self, hosts: Iterable[str]) -> dict[str, list[str]]:
        """Group hosts by the host under the controller that they are reached through."""
        groups: dict[str, list[str]] = {}
        for host in hosts:
            groups.setdefault(self.way(host)[-1], []).append(host)
        return groups

    def _children(self, slot: int) -> list[str]:
        first = self.fanout * (slot + 1)
        return [self._hosts[child] for child in range(first, first + self.fanout) if child in self._hosts]


def parent_slot(slot: int, fanout: int) -> int:
    """Return the slot above ``slot``; -1 for the controller."""
    return slot // fanout - 1


def child_towards(slot: int, below: int, fanout: int) -> int:
    """Return the child of ``slot`` that ``below`` is reached through.

    Raises:
        ValueError: ``below`` is not below ``slot``.
    """
    child = below
    while (above := parent_slot(child, fanout)) != slot:
        if above < 0:
            raise ValueError(f"slot {below} is not below slot {slot}")
        child = above
    return child
