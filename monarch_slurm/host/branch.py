"""An agent's place in the tree that casts go down and answers go up: who is above, who is below, what is passed on.

An agent listens for other agents only when the controller names one that is to be below it, and dials only the one that
the controller names. Both prove themselves with the job's keys, as to the controller: the agents' own pair serves as
the key of the one that listens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import zmq

from monarch_slurm.config import settings
from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.host.cast_order import CastOrder
from monarch_slurm.host.cast_tree import patience
from monarch_slurm.host.folds import Folder, is_foldable
from monarch_slurm.host.shares import APART, FOR_OTHERS, divide, for_one_host
from monarch_slurm.wire import (
    AGENT,
    CONTROLLER,
    Address,
    Gatekeeper,
    Invitation,
    JobKeys,
    Link,
    Loop,
    Message,
    UnknownPeerError,
    WireError,
)
from monarch_slurm.wire.arriving import late_frames, when_whole
from monarch_slurm.wire.bulk import in_place
from monarch_slurm.wire.frames import encode
from monarch_slurm.wire.large_buffers import Buffer
from monarch_slurm.wire.limits import make_context
from monarch_slurm.wire.sockets import bind_tcp, connect_tcp, make_dealer, make_router

logger = logging.getLogger(__name__)


class Branch:
    """One agent's place. Everything happens on its loop's thread.

    Args:
        context: for the connection to the agent above.
        host: id of this host; ``ip`` where agents below can reach it.
        invitation: has the agents' keys.
        deliver: called with what is for this host, in the order in which the controller sent it.
        tell: sends a message over this host's own connection with the controller.
    """

    def __init__(
        self,
        loop: Loop,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        ip: str,
        invitation: Invitation,
        deliver: Callable[[Message], None],
        tell: Callable[[Message], None],
    ) -> None:
        self._loop = loop
        self._context = context
        self._address = Address(host, AGENT)
        self._ip = ip
        # Whoever holds the agents' pair may listen for agents, as whoever holds it may join the job.
        public, secret = invitation.agent_public, invitation.agent_secret
        self._keys = JobKeys(public, secret, public, secret)
        self._invitation = replace(invitation, server_public=public)
        self._deliver = deliver
        self._tell_controller = tell
        self._order = CastOrder(deliver)
        self._folder = Folder(host)
        self._passing: list[Buffer] = []
        """Entries of hosts below that leave at the end of the round."""
        self._door: _Door | None = None
        self._parent = ""
        self._link_number = 0
        self._above: Link | None = None
        self._linked = False
        self._linked_at = self._sent_again_at = 0.0

    def heartbeat(self) -> Message:
        """Return this host's heartbeat, which acknowledges the casts that it has had its share of."""
        casts = self._order.last
        return Message("heartbeat", CONTROLLER, self._address, {"casts": casts} if casts else {})

    def send(self, message: Message) -> None:
        """Send a message to other hosts or to the controller; what is for one of them arrives there in this order."""
        if message.dst.host == CONTROLLER.host and message.kind not in FOR_OTHERS:
            if (self._linked or self._door is not None) and is_foldable(message):
                if self._folder.add(message):
                    self._loop.call_after(self._flush)
                return
            self._flush()
            barrier = self._folder.direct()
            if barrier:
                self._tell("barrier", number=barrier)
        self._tell_controller(message)

    def from_controller(self, message: Message) -> None:
        """Take what came over the controller's own connection."""
        kind, fields = message.kind, message.fields
        if kind not in APART:
            self._order.direct(message)
        elif kind == "share":
            self._share(message)
        elif kind == "barrier":
            self._order.barrier(fields["casts"])
        elif kind == "tree_child":
            self._open_door(_Below(**fields))
        elif kind == "tree_parent":
            self._dial(**fields)
        elif kind == "tree_cut":
            self._leave_parent()
        elif kind == "heartbeat":
            self._acknowledged(fields.get("folds", 0))
        else:
            self._deliver(message)

    def close(self) -> None:
        """Close the connections; what the controller may lack goes over this host's own."""
        self._hang_up()
        self._flush()
        self._pass_up([self._folder.kept()])
        if self._door is not None:
            self._door.close()

    # ---- what goes down

    def _share(self, message: Message) -> None:
        own, below = divide(message)
        for slot, part in below.items():
            self._pass_on(slot, part)
        if own is not None:
            after, directs, ranks = own
            cast = Message("cast", self._address, message.src, message.fields["cast"], message.body)
            share = for_one_host(cast, self._address, ranks)
            share.encoded = encode(share, 0)  # once, for all procs here
            self._order.share(message.fields["number"], after, directs, share)

    def _share_is_here(self, message: Message) -> None:
        if not late_frames(message.body):  # else the link has broken, and the controller sends it again
            self._share(message)

    def _pass_on(self, slot: int, message: Message) -> None:
        if self._door is None or not self._door.send(slot, message):
            logger.info("no agent below has the slot %d: the controller sends to it", slot)
            self._tell("tree_lost", slot=slot, link=0 if self._door is None else self._door.last_link(slot))

    def _open_door(self, below: _Below) -> None:
        if self._door is None:
            try:
                self._door = _Door(self._loop, self._address, self._ip, self._keys, self._from_below)
            except MonarchSlurmError as error:
                logger.warning("cannot listen for other agents, which the controller serves instead: %s", error)
                return
        self._door.expect(below)
        self._tell("tree_door", slot=below.slot, link=below.link, endpoint=self._door.endpoint)

    # ---- what goes up

    def _flush(self) -> None:
        """Let what was collected in this round go up."""
        passing, self._passing = self._passing, []
        self._pass_up([self._folder.take(self._loop.awake), *passing])

    def _pass_up(self, parts: list[Buffer]) -> None:
        data = b"".join(map(in_place, parts))
        if not data:
            return
        if self._above is not None and self._linked:
            self._above.send(Message("fold", Address(self._parent, AGENT), self._address, {}, [data]))
        else:
            self._tell_controller(Message("fold", CONTROLLER, self._address, {}, [data]))

    def _from_below(self, message: Message) -> None:
        if not self._passing:
            self._loop.call_after(self._flush)
        self._passing += message.body

    def _acknowledged(self, folds: int) -> None:
        self._folder.acknowledged(folds)
        since = self._folder.kept_since()
        if since is not None and self._above is not None and self._linked and since >= self._linked_at:
            current = settings()
            late = patience(current.missed_heartbeats) * current.heartbeat_interval
            if self._loop.awake - max(since, self._sent_again_at) > late:
                self._broken(self._above)

    def _send_again(self) -> None:
        """Send what may be lost on the way, and have those below do so."""
        self._sent_again_at = self._loop.awake
        self._flush()
        self._pass_up([self._folder.kept()])
        if self._door is not None:
            self._door.send_all(Message("again", Address("", AGENT), self._address))

    # ---- who is above

    def _dial(self, parent: str, endpoint: str, link: int) -> None:
        self._leave_parent()
        self._parent, self._link_number = parent, link
        try:
            dealer = make_dealer(self._context, _name_at_door(self._address.host, link))
        except MonarchSlurmError as error:
            logger.warning("cannot connect to the agent of %s; the controller serves this host: %s", parent, error)
            return
        connect_tcp(dealer, replace(self._invitation, address=endpoint))
        self._above = above = Link(
            self._loop,
            dealer,
            lambda _, message: self._from_above(above, message),
            lambda _, error: self._broken(above),
            dialled=endpoint,
        )
        above.send(Message("below", Address(parent, AGENT), self._address))

    def _from_above(self, link: Link, message: Message) -> None:
        if link is not self._above:
            return
        if message.kind == "above":
            self._linked, self._linked_at = True, self._loop.awake
            self._tell("tree_linked", parent=self._parent, link=self._link_number)
        elif message.kind == "share":
            when_whole(message.body, lambda: self._share_is_here(message))
        elif message.kind == "again":
            self._send_again()

    def _broken(self, link: Link) -> None:
        if link is self._above:
            self._tell("tree_lost", link=self._link_number)
            self._leave_parent()

    def _leave_parent(self) -> None:
        """Have nothing to do any more with the agent above; what may be lost on the way there is sent again."""
        linked = self._linked
        self._hang_up()
        if linked:
            self._send_again()

    def _hang_up(self) -> None:
        if self._above is not None:
            above, self._above, self._linked = self._above, None, False
            above.close()

    def _tell(self, kind: str, **fields: Any) -> None:
        self._tell_controller(Message(kind, CONTROLLER, self._address, fields))


@dataclass(frozen=True)
class _Below:
    """A host that is to connect, and the number of the attempt."""

    child: str
    slot: int
    link: int


def _name_at_door(host: str, link: int) -> str:
    # One per link: what belongs to another is told apart, and a connection that has broken unnoticed is not in the way.
    return f"{host}~{link}"


class _Door:
    """Where agents below connect."""

    def __init__(
        self, loop: Loop, address: Address, ip: str, keys: JobKeys, on_fold: Callable[[Message], None]
    ) -> None:
        self._address = address
        self._on_fold = on_fold
        self._context = make_context()  # one of its own: a context has one gatekeeper
        router = make_router(self._context)
        self._gatekeeper = Gatekeeper(self._context, router, keys, "an agent's port for agents below")
        try:
            self.endpoint = bind_tcp(router, ip, keys)
        except MonarchSlurmError:
            self._gatekeeper.close()
            self._context.destroy(linger=0)
            raise
        self._gatekeeper.attach(loop)
        self._link = Link(loop, router, self._take, self._fault, endpoints=lambda: (self.endpoint,))
        self._expected: dict[str, _Below] = {}
        self._reached: dict[int, str] = {}
        self._last_links: dict[int, int] = {}

    def expect(self, below: _Below) -> None:
        """Take an agent when it comes."""
        for name, old in list(self._expected.items()):
            # The link before this one may still have brought answers.
            if old.slot == below.slot and (old.child != below.child or old.link < below.link - 1):
                del self._expected[name]
                self._link.forget(name)
        self._expected[_name_at_door(below.child, below.link)] = below

    def last_link(self, slot: int) -> int:
        """Return the number of the last link with the child with a slot; 0 if there was none."""
        return self._last_links.get(slot, 0)

    def send(self, slot: int, message: Message) -> bool:
        """Send to the child with a slot; False if it is not there. Then it is sent nothing any more."""
        name = self._reached.get(slot)
        if name is None:
            return False
        try:
            self._link.send(message, name)
        except UnknownPeerError:
            del self._reached[slot]
            return False
        return True

    def send_all(self, message: Message) -> None:
        """Send to all children that are there."""
        for slot in list(self._reached):
            self.send(slot, message)

    def close(self) -> None:
        self._gatekeeper.close()
        self._link.close()
        self._context.destroy(linger=0)

    def _take(self, peer: str, message: Message) -> None:
        below = self._expected.get(peer)
        if below is None or message.src.host != below.child:
            logger.error("an agent that the controller has not announced wants casts as %s; dropped", peer)
        elif message.kind == "below":
            self._reached[below.slot] = peer
            self._last_links[below.slot] = below.link
            self._link.send(Message("above", message.src, self._address), peer)
        elif message.kind == "fold":
            self._on_fold(message)

    def _fault(self, peer: str, error: WireError) -> None:
        logger.error("%s on the link from the agent below, %s", error, peer)
        below = self._expected.get(peer)
        if below is not None and self._reached.get(below.slot) == peer:
            del self._reached[below.slot]
