"""What agents have for the controller, handed on in the order in which each of them sent it, whichever way it came."""

from __future__ import annotations

from collections.abc import Callable

from monarch_slurm.host.cast_order import CastOrder
from monarch_slurm.host.folds import entries
from monarch_slurm.wire import AGENT, CONTROLLER, Address, Loop, Message


class Incoming:
    """The messages of the hosts that are there; those of others are dropped.

    Args:
        loop: whose thread calls all but `take_quickly`.
        take: called with each message when it is its turn.
        take_on_arrival: may take some messages before ``take`` would, on the thread that reads; true: it has.
    """

    def __init__(self, loop: Loop, take: Callable[[Message], None], take_on_arrival: Callable[[Message], bool]) -> None:
        self._loop = loop
        self._take = take
        self._take_on_arrival = take_on_arrival
        self._orders: dict[str, CastOrder] = {}

    def join(self, host: str) -> None:
        """A host has joined."""
        self._orders[host] = CastOrder(self._in_turn)

    def leave(self, host: str) -> None:
        """A host has ended or is given up."""
        self._orders.pop(host, None)

    def folds(self, host: str) -> int:
        """Return the number of the last entry of folded answers that was taken of a host, and with it all before."""
        order = self._orders.get(host)
        return 0 if order is None else order.last

    def direct(self, host: str, message: Message) -> None:
        """A message has come over the host's own connection."""
        order = self._orders.get(host)
        if order is None:
            return
        if message.kind == "barrier":
            order.barrier(message.fields["number"])
        else:
            order.direct(message)

    def folded(self, message: Message) -> None:
        """Folded answers have come, of one host or of many.

        Raises:
            WireError: these are none.
        """
        for host, number, directs, replies, ends in entries(message.body):
            order = self._orders.get(host)
            if order is not None:
                entry = Message("ports", CONTROLLER, Address(host, AGENT), {"replies": replies, "ends": ends})
                order.share(number, number - 1, directs, entry)

    def take_quickly(self, host: str, message: Message) -> bool:
        """Return whether a message was taken on arrival, where nothing of its host waits for its turn. Any thread."""
        order = self._orders.get(host)
        if order is None or not order.is_idle() or not self._take_on_arrival(message):
            return False
        if order.went_by():
            self._loop.call_soon(order.go_on)
        return True

    def _in_turn(self, message: Message) -> None:
        self._take(message)
        if message.kind == "ports":
            for fields in message.fields["ends"]:
                self._take(Message("proc_down", CONTROLLER, message.src, fields))
