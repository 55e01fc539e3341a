"""The controller's side of casts: what each host was sent by which way, and what must be sent again.

A cast to many hosts goes to the hosts under the controller in the tree (`cast_tree`); their agents pass on the shares
of those below. Nobody on the way is trusted to have done so: each host tells with its heartbeats which casts it has
had, and a cast is kept until all have. When the way to a host breaks, because an agent on it is
gone, cannot reach the next or is late, the topmost host behind the break is put under the controller, and what the
hosts behind it may lack is sent again. The receivers drop what they have (`cast_order`). Later the host is linked to
the one above again (`relinking`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from monarch_slurm.host.cast_tree import CastTree, patience
from monarch_slurm.host.relinking import Relinking
from monarch_slurm.host.shares import APART, Ranks, packed
from monarch_slurm.wire import AGENT, CONTROLLER, Address, Message, UnknownPeerError

logger = logging.getLogger(__name__)

_PLANS = 256
"""Sets of targets whose plans are remembered."""


@dataclass
class _Plan:
    """How a cast to certain ranks is sent while the tree has a certain version.

    Attributes:
        entries: by host: its slot and ranks, as agents are told.
        tops: the hosts that are sent to, each with the hosts reached through it.
        absent: targets that are not in the tree.
        deep: not every host is under the controller.
    """

    version: int
    entries: dict[str, list[Any]]
    hosts: frozenset[str]
    tops: list[tuple[str, list[str]]]
    absent: list[tuple[str, Ranks]]
    deep: bool


@dataclass
class _Sent:
    """A cast that some host may not have had yet.

    Attributes:
        after: number of the cast before it for most of its hosts; ``odd`` has that, and the number of direct messages
            before it, for the others.
    """

    number: int
    after: int
    odd: dict[str, list[int]]
    message: Message
    fields: dict[str, Any]
    plan: _Plan


class Caster:
    """Sends to the hosts of a job, directly or down the tree. The caller holds a lock.

    Args:
        fanout: hosts that are sent to by one.
        missed_heartbeats: how many may be missing until a host is lost; see `cast_tree.patience`.
        send: sends a message to the agent of a host; raises `UnknownPeerError`.
    """

    def __init__(self, fanout: int, missed_heartbeats: int, send: Callable[[Message, str], None]) -> None:
        self.tree = CastTree(fanout)
        self._links = Relinking(2 * missed_heartbeats)
        self._send = send
        self._number = 0
        self._last: dict[str, int] = {}
        """By host, the number of the last cast to it, but for the plan that was used last."""
        self._current: _Plan | None = None
        self._directs: dict[str, int] = {}
        self._dirty: set[str] = set()
        """Hosts that were sent something directly since the last cast to them."""
        self._barred: dict[str, int] = {}
        self._acked: dict[str, int] = {}
        self._kept: deque[_Sent] = deque()
        self._linked_at: dict[str, int] = {}
        """By linked host, the last cast that it was sent by another way."""
        self._patience = patience(missed_heartbeats)
        self._marks = deque([0] * self._patience, self._patience)
        """Number of the last cast at each of the last heartbeats."""
        self._beats = 0
        self._resent_at: dict[str, int] = {}
        """By host, the heartbeat when what it may have lacked was sent again."""
        self._plans: dict[tuple[str, str], _Plan] = {}

    # ---- hosts

    def join(self, host: str) -> None:
        """A host has joined."""
        self._acked[host] = 0
        for parent, child in self.tree.join(host):
            self._link(parent, child)

    def leave(self, host: str) -> None:
        """A host has ended or is given up: what it would have passed on is sent again."""
        self._settle()
        for record in (self._last, self._directs, self._barred, self._acked, self._linked_at, self._resent_at):
            record.pop(host, None)
        self._dirty.discard(host)
        self._links.forget(host)
        for child in self.tree.leave(host):
            self._adopt(child)

    def take(self, message: Message) -> None:
        """An agent says how things are in the tree."""
        host, fields = message.src.host, message.fields
        child = (self.tree.host(fields["slot"]) or "") if "slot" in fields else host
        if not self._links.is_last(child, fields["link"]):
            return  # of a link that is given up
        if message.kind == "tree_door":
            if self.tree.parent(child) == host:
                self._tell(child, "tree_parent", parent=host, endpoint=fields["endpoint"], link=fields["link"])
        elif message.kind == "tree_linked":
            if self.tree.link(child, fields["parent"]):
                self._links.made(child)
                self._linked_at[child] = self._last_of(child)
        elif message.kind == "tree_lost":
            self._cut(child, "its connection to the agent above is gone")

    def heard(self, host: str, casts: int) -> None:
        """A host has had all casts up to the number ``casts``."""
        self._acked[host] = casts
        if casts < self._marks[0] and self._is_late(host) and not self._is_late(self.tree.parent(host) or ""):
            self._cut(host, "casts that were passed on to it have not arrived")

    def beat(self) -> None:
        """To be called once per heartbeat."""
        self._beats += 1
        self._marks.append(self._number)
        if self._kept:
            missing = [had for host, had in self._acked.items() if self.tree.linked(host) and had < self._last_of(host)]
            least = min(missing, default=self._number)
            while self._kept and self._kept[0].number <= least:
                self._kept.popleft()
        for host in self._links.beat():
            parent = self.tree.parent(host)
            if parent is None:
                self._links.given_up(host)
            else:
                self._link(parent, host)

    def _is_late(self, host: str) -> bool:
        """Return whether a host lacks a cast that was sent too long ago through others."""
        if not self.tree.linked(host) or self._beats - self._resent_at.get(host, -self._patience) < self._patience:
            return False
        # What it was sent by another way before may be late, too, but not for want of those above.
        return self._linked_at[host] <= self._acked[host] < min(self._last_of(host), self._marks[0])

    def _link(self, parent: str, child: str) -> None:
        self._tell(parent, "tree_child", child=child, slot=self.tree.slot(child), link=self._links.attempt(child))

    def _cut(self, host: str, why: str) -> None:
        if self.tree.cut(host):
            logger.info("host %s gets casts from the controller itself: %s", host.partition("#")[0], why)
            self._adopt(host)

    def _adopt(self, host: str) -> None:
        self._links.broken(host, proved=self._acked[host] > self._linked_at[host])
        self._tell(host, "tree_cut")
        there = self.tree.through(host)
        for sent in self._kept:
            lacking = [other for other in there if other in sent.plan.entries and self._acked[other] < sent.number]
            if lacking:
                self._quietly(self._share(sent, host, lacking), host)
                self._resent_at.update(dict.fromkeys(lacking, self._beats))

    # ---- sending

    def direct(self, message: Message, host: str) -> None:
        """Send ``message`` to the agent of ``host`` over its own connection.

        Raises:
            UnknownPeerError: it has none.
        """
        if message.kind not in APART:
            last = self._last_of(host)
            if last > self._barred.get(host, 0):
                self._send(Message("barrier", Address(host, AGENT), CONTROLLER, {"casts": last}), host)
                self._barred[host] = last
        self._send(message, host)
        if message.kind not in APART:
            self._directs[host] = self._directs.get(host, 0) + 1
            self._dirty.add(host)

    def cast(self, message: Message) -> tuple[list[tuple[str, Ranks]], list[str]]:
        """Send the "casts" ``message`` to all its targets.

        Returns:
            The targets that are not in the tree, and hosts that it could not be sent to.
        """
        fields = {**message.fields}
        targets, key = fields.pop("targets"), fields.pop("key")
        plan = self._plan((message.src.host, key), targets)
        after, odd = self._before(plan)
        self._number += 1
        sent = _Sent(self._number, after, odd, message, fields, plan)
        unreachable = []
        for top, hosts in plan.tops:
            try:
                self._send(self._share(sent, top, hosts), top)
            except UnknownPeerError:
                unreachable.append(top)
        if plan.deep:
            self._kept.append(sent)
        return plan.absent, unreachable

    def _share(self, sent: _Sent, top: str, hosts: Iterable[str]) -> Message:
        tree, entries, odd = self.tree, sent.plan.entries, sent.odd
        fields = {
            "number": sent.number,
            "after": sent.after,
            "odd": {tree.slot(host): odd[host] for host in odd.keys() & set(hosts)} if odd else {},
            "to": [entries[host] for host in hosts],
            "slot": tree.slot(top),
            "fanout": tree.fanout,
            "cast": sent.fields,
        }
        return Message("share", Address(top, AGENT), sent.message.src, fields, sent.message.body)

    def _before(self, plan: _Plan) -> tuple[int, dict[str, list[int]]]:
        """Return what was sent before a cast by ``plan``: number of the last cast, and for which hosts it is odd."""
        touched = self._dirty & plan.hosts
        self._dirty -= touched
        odd_hosts = set(touched)
        if self._current is plan:
            after = self._number
        else:
            self._settle()
            lasts = [self._last.get(host, 0) for host in plan.entries]
            after = max(set(lasts), key=lasts.count) if len(set(lasts)) < _PLANS else 0
            odd_hosts.update(host for host, last in zip(plan.entries, lasts, strict=True) if last != after)
        odd = {host: [self._last_of(host), self._directs.get(host, 0)] for host in odd_hosts}
        self._current = plan
        return after, odd

    def _settle(self) -> None:
        if self._current is not None:
            # The last cast was by this plan: before another is used, the current one is settled.
            self._last.update(dict.fromkeys(self._current.hosts, self._number))
            self._current = None

    def _last_of(self, host: str) -> int:
        if self._current is not None and host in self._current.hosts:
            return self._number
        return self._last.get(host, 0)

    def _plan(self, key: tuple[str, str], targets: Sequence[tuple[str, Ranks]]) -> _Plan:
        plan = self._plans.get(key)
        if plan is None or plan.version != self.tree.version:
            tree = self.tree
            entries = {host: [tree.slot(host), *packed(ranks)] for host, ranks in targets if host in tree}
            tops = list(tree.by_top(entries).items())
            absent = [(host, ranks) for host, ranks in targets if host not in tree]
            deep = any(hosts != [top] for top, hosts in tops)
            plan = _Plan(tree.version, entries, frozenset(entries), tops, absent, deep)
            self._plans.pop(key, None)
            self._plans[key] = plan
            if len(self._plans) > _PLANS:
                del self._plans[next(iter(self._plans))]
        return plan

    def _tell(self, host: str, kind: str, **fields: Any) -> None:
        self._quietly(Message(kind, Address(host, AGENT), CONTROLLER, fields), host)

    def _quietly(self, message: Message, host: str) -> None:
        try:
            self._send(message, host)
        except UnknownPeerError:
            return  # its end is about to be noticed
