"""Direct links between two processes of one host: their messages do not pass through the agent.

A process that has called a proc of its host some times asks it, through the agent, for a link. The other one makes a
pair of connected sockets and hands one of them back, the same way: the agent lets each of its procs speak in its own
name only, and so both know whom they are connected with. A link belongs to the two processes and ends with either.

Two ways would mix up the order of messages. So each direction of a link is used in turns, and the receiver is told of
them: ``direct_on``, sent through the agent, follows what went that way before; what the link brings waits for it.
``direct_off``, sent over the link, follows what went there; what the agent brings of that sender waits for it. What is
for several procs, and what the agent itself does something about, goes through the agent, and a link that is used then
again brings nothing that could come before it.

When a process ends, what it has written to its links is there already: it is read before the news of the end is taken.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from monarch_slurm.actor.direct_asks import Asks
from monarch_slurm.actor.direct_link import Connections, DirectLink
from monarch_slurm.host.shares import FOR_OTHERS
from monarch_slurm.wire import AGENT, CONTROLLER, Address, Loop, Message, UnknownPeerError, WireError
from monarch_slurm.wire.bulk import Handed
from monarch_slurm.wire.large_buffers import Buffer
from monarch_slurm.wire.limits import descriptors_left
from monarch_slurm.wire.stream_peer import Ears

logger = logging.getLogger(__name__)

MAX_LINKS = 64
"""Links of one process; more are not made."""

_BACK_AFTER = 4
"""Messages through the agent after which a link that was left is used again."""

_MAKING = frozenset(("spawn", "casts", "cast"))
"""Kinds of messages that make procs or actors, unless they are calls."""


class DirectLinks:
    """The direct links of one process.

    Args:
        here: this process; ``incarnation`` is how often it was started again.
        connections: the connection with the agent is one of them, or the agents' are.
        route: sends a message through the agent.
        reaches: whether procs of a host, by its id, may be asked for links.
        knows: whether the actor is here, or was, that a message is for; any thread asks.
        on_quick: takes some messages, on any thread; true: it has taken the message.
        deliver: takes a message, on the loop's thread.
        on_fault: called on the loop's thread when a process has sent what is no message.
    """

    def __init__(
        self,
        here: Address,
        incarnation: int,
        connections: Connections,
        route: Callable[[Message], None],
        reaches: Callable[[str], bool],
        knows: Callable[[Message], bool],
        on_quick: Callable[[Message], bool],
        deliver: Callable[[Message], None],
        on_fault: Callable[[Address, WireError], None],
    ) -> None:
        self._here = here
        self._incarnation = incarnation
        self._connections = connections
        self._route = route
        self._reaches = reaches
        self._knows = knows
        self._on_quick = on_quick
        self._deliver = deliver
        self._on_fault = on_fault
        self._lock = threading.Lock()
        self._links: dict[str, DirectLink] = {}
        self.asks = Asks()
        self._numbers = itertools.count()
        self._reading = False
        """Whether what links have brought is being read before something that the agent has brought is taken."""
        self._later: deque[Message] = deque()
        """What the agent has brought meanwhile."""

    # ---- sending

    def send(self, message: Message) -> None:
        """Send ``message`` by whatever way. For any thread; keeps the order of one thread."""
        with self._lock:
            link = self._way(message)
            if link is not None and link.sending:
                try:
                    self._connections.send(message, link.name)
                except UnknownPeerError:  # its process has ended; the agent knows how, or will
                    link.sending = link.agreed = False
                else:
                    return
            self._route(message)

    def _way(self, message: Message) -> DirectLink | None:
        """Return the link that ``message`` may go by, having left those that it may not be overtaken by."""
        kind, (host, name) = message.kind, message.dst
        if name == AGENT:
            fields = message.fields
            if kind != "cast":
                self._leave(self._links.values())
                return None
            if host == CONTROLLER.host:
                name = CONTROLLER.proc
            else:
                ranks, mesh = fields["base_ranks"], fields["proc_mesh"]
                if fields["op"] != "call":
                    self._leave(self._links.values())
                    return None
                if len(ranks) != 1:
                    names = (f"{mesh}.{rank}" for rank in ranks if self._links)
                    self._leave([self._links[name] for name in names if name in self._links])
                    return None
                name = f"{mesh}.{ranks[0]}"
        elif kind in FOR_OTHERS:
            self._leave(self._links.values())
            return None
        link = self._links.get(name)
        if link is None:
            if kind == "cast":
                self._count(Address(host, name))
        elif link.agreed and not link.sending:
            link.routed += 1
            if link.routed > _BACK_AFTER:
                self._begin(link)
        return link

    def _leave(self, links: Iterable[DirectLink]) -> None:
        for link in links:
            if link.sending:
                link.sending = False
                # The controller gets answers folded, and no more by their sender: all of them go by its link.
                link.routed = _BACK_AFTER if link.address == CONTROLLER else 0
                with contextlib.suppress(UnknownPeerError):
                    self._connections.send(Message("direct_off", link.address, self._here), link.name)

    def make_way(self, message: Message) -> None:
        """What is sent from here on is not to overtake ``message`` of another process, which was passed on if it makes
        procs or actors. For any thread.
        """
        if self._links and message.kind in _MAKING and message.fields.get("op") != "call":
            with self._lock:
                self._leave(self._links.values())

    def _begin(self, link: DirectLink) -> None:
        self._route(Message("direct_on", link.address, self._here))
        link.sending = True

    def _count(self, proc: Address) -> None:
        name = proc.proc
        if name in self.asks or name == self._here.proc or not self._reaches(proc.host):
            return
        if self.asks.count(name) and self._has_room():
            self._route(Message("direct_ask", proc, self._here, self._fields(self.asks.ask(name))))

    def _fields(self, token: str) -> dict[str, Any]:
        return {"token": token, "incarnation": self._incarnation}

    def _has_room(self) -> bool:
        return len(self._links) + len(self.asks) < MAX_LINKS and descriptors_left() > 0

    # ---- taking what the agent brings

    def blocks(self, message: Message) -> bool:
        """Return whether ``message``, which the agent has brought, has to wait for its turn: `take` sees to that."""
        link = self._links.get(message.src.proc)
        return self._reading or (link is not None and link.open)

    def take(self, message: Message) -> bool:
        """Look at a message that the agent has brought; return whether it need not be delivered, or not yet. On the
        loop's thread.
        """
        if self._reading:
            self._later.append(message)
            return True
        return self._take(message)

    def _take(self, message: Message) -> bool:
        kind = message.kind
        if kind in _NEWS:
            return self._take_news(message)
        link = self._links.get(message.src.proc)
        if link is not None and link.open and link.address == message.src:
            link.held.append(message)
        elif kind == "exit" and self._links:
            self._read_before(message, list(self._links.values()))
        elif kind == "direct_known":
            self._known(message.fields["link"])
        elif kind == "direct_on":
            if link is not None and link.address == message.src:
                self._on(link)
        elif kind == "direct_ask":
            self._offer(message)
        elif kind == "direct_offer":
            self._accept(message)
        else:
            return False
        return True

    def _take_news(self, message: Message) -> bool:
        fields = message.fields
        if message.kind == "host_down":
            self._drop_host(fields["host"])
            return False
        names, last = [fields.get("proc", "")], math.inf
        if message.kind == "procs_restart":
            names, last = [f"{fields['down']['mesh']}.{rank}" for rank in fields["ranks"]], fields["incarnation"]
        ended = []
        with self._lock:
            for name in names:
                self.asks.forget(name)
                link = self._links.get(name)
                if link is not None and link.incarnation <= last:
                    link.agreed = link.sending = False
                    ended.append(link)
        if ended:
            self._read_before(message, ended, ended=True)
        return bool(ended)

    def _read_before(self, message: Message, links: list[DirectLink], ended: bool = False) -> None:
        """Take all that ``links`` have brought, and then ``message``.

        Args:
            ended: the processes at their other ends have ended.
        """
        self._reading = True

        def read() -> None:
            for link in links:
                if not link.gone:
                    Loop.guard(lambda link=link: self._connections.read_all(link.name))  # type: ignore[misc]
                if ended:
                    self._hang_up(link)
            self._connections.order.hand_over(take)

        def take() -> None:
            self._reading = False
            for link in links if ended else ():
                self._end(link, for_certain=True)
            self._hand_out(message)
            while self._later and not self._reading:
                later = self._later.popleft()
                Loop.guard(lambda: None if self._take(later) else self._deliver(later))  # noqa: B023 - called at once

        self._connections.between(read)

    def _hang_up(self, link: DirectLink) -> None:
        if not link.gone:
            link.gone = True
            self._connections.forget(link.name)

    def _drop_host(self, host: str) -> None:
        """The host is lost, with what its procs have said and has not been read."""
        lost = [link for link in self._links.values() if link.address.host == host]
        for link in lost:
            with self._lock:
                link.agreed = link.sending = False
                self._links.pop(link.address.proc, None)
            self._connections.between(lambda link=link: self._hang_up(link))  # type: ignore[misc]
            while link.held:
                self._take_held(link.held.popleft())

    # ---- making links

    def _offer(self, message: Message) -> None:
        name = message.src.proc
        with self._lock:
            # Of two that ask each other one waits for the other's answer.
            if name in self.asks and self._here.proc < name:
                return
            self.asks.withdraw(name)
            body: list[Buffer] = []
            if name not in self._links and self._has_room():
                ours, theirs = socket.socketpair()
                self._adopt(ours, message)
                body = [Handed(theirs.detach())]
            self._route(Message("direct_offer", message.src, self._here, self._fields(message.fields["token"]), body))

    def _accept(self, message: Message) -> None:
        name = message.src.proc
        with self._lock:
            if not self.asks.answered(name, message.fields["token"]):
                return  # it was for the process that this one was before, or that one was another
            if message.body and isinstance(handed := message.body[0], Handed):
                link = self._adopt(socket.socket(fileno=os.dup(handed.fd)), message)
                link.agreed = True
                self._begin(link)

    def _adopt(self, connection: socket.socket, message: Message) -> DirectLink:
        address = message.src
        link = DirectLink(address, f"direct {next(self._numbers)} {address.proc}", message.fields["incarnation"])
        self._links[address.proc] = link
        ears = Ears(
            lambda message: self._arrived(link, message),
            lambda: self._closed(link),
            lambda error: self._broken(link, error),
        )
        self._connections.adopt(connection, link.name, ears)
        return link

    # ---- taking what links bring

    def _arrived(self, link: DirectLink, message: Message, known: bool = False) -> None:
        if message.src != link.address:
            logger.error("%s spoke as %s on its direct link; dropped", link.address, message.src)
        elif not link.reading:
            link.waiting.append(message)
        elif message.kind == "direct_off":
            link.reading = False
            self._connections.order.hand_over(lambda: self._off(link))
        elif not known and message.kind == "cast" and not self._knows(message):
            # Somebody else may have made the actor. That has passed the agent, and comes before what is sent to it now.
            link.reading = False
            link.waiting.appendleft(message)
            self._route(Message("direct_known", self._here, self._here, {"link": link.name}))
        else:
            self._connections.order.hand_on(
                link.name,
                message,
                lambda _, message: self._on_quick(message),
                lambda _, message: self._deliver(message),
            )

    def _on(self, link: DirectLink) -> None:
        link.open = True
        with self._lock:
            link.agreed = not link.gone
        self._connections.between(lambda: self._resume(link))

    def _resume(self, link: DirectLink, known: bool = False) -> None:
        if link.gone:
            self._connections.order.hand_over(lambda: self._end(link))
            return
        link.reading = True
        waiting, link.waiting = link.waiting, deque()
        for number, message in enumerate(waiting):
            self._arrived(link, message, known and number == 0)

    def _known(self, name: str) -> None:
        for link in self._links.values():
            if link.name == name:
                self._connections.between(lambda link=link: self._resume(link, known=True))  # type: ignore[misc]

    def _off(self, link: DirectLink) -> None:
        link.open = False
        self._release(link)

    def _release(self, link: DirectLink) -> None:
        while link.held and not link.open:
            self._take_held(link.held.popleft())

    def _take_held(self, message: Message) -> None:
        Loop.guard(lambda: self._deliver(message) if message.kind == "exit" or not self._take(message) else None)

    def _hand_out(self, message: Message) -> None:
        Loop.guard(lambda: self._deliver(message))

    # ---- the end

    def _closed(self, link: DirectLink) -> None:
        if not link.gone:
            link.gone = True
            self._connections.order.hand_over(lambda: self._end(link))

    def _broken(self, link: DirectLink, error: WireError) -> None:
        self._closed(link)
        self._connections.order.hand_over(lambda: self._on_fault(link.address, error))

    def _end(self, link: DirectLink, for_certain: bool = False) -> None:
        """Nothing comes any more on ``link``: take what has come, in order.

        Args:
            for_certain: nor does anything of its sender through the agent.
        """
        with self._lock:
            link.agreed = link.sending = False
        while link.held or (link.open and link.waiting):
            if not (link.open and link.waiting):
                message = link.held.popleft()
                link.open = message.kind == "direct_on"
                if not link.open:
                    self._take_held(message)
            elif (message := link.waiting.popleft()).kind == "direct_off":
                link.open = False
            else:
                self._hand_out(message)
        link.open = False
        if link.waiting and not for_certain:
            return  # the agent is about to bring the `direct_on` of what waits
        with self._lock:
            if self._links.get(link.address.proc) is link:
                del self._links[link.address.proc]


_NEWS = frozenset(("proc_down", "procs_restart", "proc_failed", "host_down"))
"""What tells of the end of other processes."""
